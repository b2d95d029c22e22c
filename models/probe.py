"""Recall tests: a value is stated, stories follow, and it is asked for at a known distance."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from corpus import Encoder
from document import ASSISTANT, USER, Document, Kind
from fact import Fact, everyday_fact, passkey, variable
from story import make_story
from words import COLOURS, NAMES, THINGS, number

PROBE_KINDS = (
    "passkey",
    "8 facts, word",
    "8 facts, word, chat",
    "8 facts, number",
    "8 pairs, word",
    "8 pairs, 2 digits",
    "3 variables, half aliased",
)
_TARGET = Kind.REPEAT  # marks the target value where it is stated
_ANSWER = Kind.FACT  # marks the target value where it is asked for


@dataclass(frozen=True)
class Probe:
    """`prompt` ends where `answer` must begin; `distance` is measured between the two values."""

    prompt: list[int]
    answer: list[int]
    distance: int


def make_probe(rng: random.Random, encoder: Encoder, kind: str, distance: int) -> Probe:
    """A probe whose distance is `distance` or up to one sentence more."""
    opening, closing = _pairs(rng, kind) if "pairs" in kind else _facts(rng, kind)
    head, head_kinds = encoder.encode_document(opening)
    tail, tail_kinds = encoder.encode_document(closing)
    told_at, asked_at = head_kinds.index(_TARGET), tail_kinds.index(_ANSWER)
    asked_until = len(tail_kinds) - tail_kinds[::-1].index(_ANSWER)
    room = distance - (len(head) - told_at) - asked_at
    middle = _stories(rng, encoder, room, in_chat=kind.endswith("chat"))
    return Probe(
        prompt=[encoder.bos, *head, *middle, *tail[:asked_at]],
        answer=tail[asked_at:asked_until],
        distance=len(head) - told_at + len(middle) + asked_at,
    )


def probe_series(
    rng: random.Random, encoder: Encoder, distances: Sequence[int], n_facts: int = 8
) -> list[tuple[int, Probe]]:
    """Every fact of one list, words and numbers in turn, asked for at every distance.

    The prompts share their beginnings, so that a cache has to evaluate those once: the list, then
    the stories up to one distance, then those up to the next.

    Args:
        distances: tokens of stories between the list and the question, each in turn.

    Returns:
        (distance, probe) by distance; a probe's own distance counts from value to value.
    """
    facts: list[Fact] = []
    for index in range(n_facts):
        used = {fact.key for fact in facts}
        facts.append(everyday_fact(rng, used, numeric=index % 2 == 1))
    opening = Document()
    told_at: list[int] = []
    for fact in facts:
        opening.say(fact.statement)
        told_at.append(len(encoder.encode_document(opening)[0]))
        opening.say(fact.value).say(fact.tail)
    head, _ = encoder.encode_document(opening)
    series = []
    for distance, middle in _growing_stories(rng, encoder, sorted(distances)):
        for fact, told in zip(facts, told_at, strict=True):
            closing = Document().say("Question:").say(fact.question).say("Answer:")
            closing.say(fact.statement).say(fact.value, _ANSWER)
            tail, kinds = encoder.encode_document(closing)
            asked_at = kinds.index(_ANSWER)
            between = len(head) - told + len(middle) + asked_at
            prompt = [encoder.bos, *head, *middle, *tail[:asked_at]]
            series.append((distance, Probe(prompt, tail[asked_at:], between)))
    return series


def _growing_stories(
    rng: random.Random, encoder: Encoder, lengths: Sequence[int]
) -> Iterator[tuple[int, list[int]]]:
    """Whole sentences of stories that fill at least each length, each the next one's beginning."""
    document = Document()
    ids: list[int] = []
    waiting: list[str] = []
    for length in lengths:
        while len(ids) < length:
            waiting = waiting or list(make_story(rng).sentences)
            document.say(waiting.pop(0))
            ids, _ = encoder.encode_document(document)
        yield length, ids


def _facts(rng: random.Random, kind: str) -> tuple[Document, Document]:
    facts: list[Fact] = []
    if kind == "passkey":
        number_of_five = number(rng, 5)
        secret = passkey(rng)
        facts = [Fact(secret.key, secret.statement, number_of_five, secret.question)]
        target = facts[0]
    elif kind.startswith("3 variables"):
        for index in range(4):
            facts.append(variable(rng, facts, alias_chance=float(index == 3)))
        target = facts[3] if rng.random() < 0.5 else rng.choice(facts[:3])
    else:
        for _ in range(8):
            used = {fact.key for fact in facts}
            facts.append(everyday_fact(rng, used, numeric=kind.endswith("number")))
        target = rng.choice(facts)
    in_chat = kind.endswith("chat")
    opening, closing = Document(), Document()
    if in_chat:
        opening.turn(USER).say("Remember this:", Kind.REQUEST)
    for fact in facts:
        opening.say(fact.given or fact.statement)
        opening.say(fact.alias_of or fact.value, _TARGET if fact is target else Kind.FRESH)
        opening.say(fact.tail)
    if in_chat:
        opening.turn(ASSISTANT).say("I will remember that.").end()
        closing.turn(USER).say(target.question).turn(ASSISTANT)
    else:
        closing.say("Question:").say(target.question).say("Answer:")
    closing.say(target.statement).say(target.value, _ANSWER)
    return opening, closing


def _pairs(rng: random.Random, kind: str) -> tuple[Document, Document]:
    keys = rng.sample(THINGS + NAMES, 8)
    if kind.endswith("word"):
        values = rng.sample(THINGS + NAMES + COLOURS, 8)
    else:
        values = [number(rng, 2) for _ in keys]
    target = rng.randrange(8)
    opening, closing = Document().say("Notes:"), Document().say("Recall:")
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        opening.say(key).say(value, _TARGET if index == target else Kind.FRESH)
        opening.say("." if index == 7 else ",")
    closing.say(keys[target]).say(values[target], _ANSWER)
    return opening, closing


def _stories(rng: random.Random, encoder: Encoder, room: int, in_chat: bool) -> list[int]:
    """Whole sentences of stories that fill at least `room` tokens."""
    if room <= 0:
        return []
    document = Document()
    if in_chat:
        document.turn(USER).say("Tell me a story.").turn(ASSISTANT)
    ids: list[int] = []
    waiting: list[str] = []
    while len(ids) < room - in_chat:
        waiting = waiting or list(make_story(rng).sentences)
        document.say(waiting.pop(0))
        ids, _ = encoder.encode_document(document)
    return encoder.encode_document(document.end())[0] if in_chat else ids
