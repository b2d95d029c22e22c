"""Mixes documents into training rows of one length.

Run as a program, it prints documents: `python models/corpus.py --seed 1 --count 5`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from typing import Protocol

from chat import memory_chat, name_kinds, personal_chat, story_chat
from document import Document, Kind
from note import notebook, repeated_words, word_list
from story import make_story
from words import COLOURS, NAMES, THINGS

_CHARACTERS_PER_TOKEN = 3.5
_REPEATABLE = list(THINGS + NAMES + COLOURS)


class Encoder(Protocol):
    """Turns a document into token ids and the kind of every token."""

    bos: int

    def encode_document(self, document: Document) -> tuple[list[int], list[int]]: ...


def plain_story(rng: random.Random, short: bool = False, careful: bool = False) -> Document:
    """A story on its own, without a prompt; in a careful one the names count more."""
    document = Document()
    story = make_story(rng, short=short)
    kinds = name_kinds(story) if careful else {}
    for sentence in story.sentences:
        document.say_marked(sentence, kinds)
    return document.end()


def make_document(rng: random.Random, genre: str, tokens: int) -> Document:
    """One document of a genre; long genres fill about `tokens` tokens."""
    length = int(tokens * _CHARACTERS_PER_TOKEN)
    makers: dict[str, Callable[[], Document]] = {
        "story": lambda: plain_story(rng),
        "short story": lambda: plain_story(rng, short=True),
        "story chat": lambda: story_chat(rng),
        "careful story": lambda: plain_story(rng, careful=True),
        "careful story chat": lambda: story_chat(rng, careful=True),
        "careful rare story chat": lambda: story_chat(rng, rare=True, careful=True),
        "rare story chat": lambda: story_chat(rng, rare=True),
        "personal chat": lambda: personal_chat(rng, length),
        "memory chat": lambda: memory_chat(rng, length),
        "notebook": lambda: notebook(rng, length),
        "list": lambda: word_list(rng, length, with_stories=False),
        "list and stories": lambda: word_list(rng, length, with_stories=True),
        "repeat": lambda: repeated_words(rng, length, _REPEATABLE),
    }
    return makers[genre]()


def make_row(
    rng: random.Random, encoder: Encoder, mixture: Mapping[str, float], length: int
) -> tuple[list[int], list[int]]:
    """Documents of one genre, each after a BOS token, cut to exactly `length` tokens."""
    genre = rng.choices(list(mixture), list(mixture.values()))[0]
    ids: list[int] = []
    kinds: list[int] = []
    while len(ids) < length:
        document_ids, document_kinds = encoder.encode_document(make_document(rng, genre, length))
        ids += [encoder.bos, *document_ids]
        kinds += [Kind.FRESH, *document_kinds]
    return ids[:length], kinds[:length]


def tokenizer_texts(seed: int, count: int) -> list[str]:
    """Marker-free lines on which the tokenizer is trained, with every listed word among them."""
    rng = random.Random(seed)
    genres = ("story", "story", "story chat", "story chat", "memory chat", "notebook", "list")
    lines: list[str] = []
    for index in range(count):
        document = make_document(rng, genres[index % len(genres)], 250)
        lines += [line for run in document.runs() for line in run.split("\n") if line]
    words = list(THINGS + NAMES + COLOURS)
    for _ in range(count // 2):
        lines.append(" ".join(rng.sample(words, 20)))
    return lines


def _main() -> None:
    parser = argparse.ArgumentParser(description="Print documents of the corpus.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=5)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    for _ in range(options.count):
        for genre in ("story", "story chat", "memory chat", "notebook", "list and stories"):
            print(f"--- {genre}\n{make_document(rng, genre, 256).text}\n")


if __name__ == "__main__":
    _main()
