"""PLaMo's tokenizer: the best of all ways to cut a text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from localkv.config import PRE, Overrides
from localkv.errors import ModelFileError, UsageError
from localkv.loader.metadata import Metadata
from localkv.loader.tokenizer import Tokenizer, tokenizer_from_metadata

HEAD = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
UNKNOWN, NORMAL, CONTROL, BYTE = 2, 1, 3, 6


def plamo(scores: dict[str, float], **more: Any) -> Tokenizer:
    values = {
        "model": "plamo2",
        "tokens": [*HEAD, *BYTES, *scores],
        "scores": [0.0] * (len(HEAD) + len(BYTES)) + list(scores.values()),
        "token_type": [UNKNOWN, *[CONTROL] * 3, *[BYTE] * 256, *[NORMAL] * len(scores)],
        **more,
    }
    return tokenizer_from_metadata(
        Metadata({f"tokenizer.ggml.{key}": value for key, value in values.items()})
    )


def texts_of(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special=False)
    return [tokenizer.id_to_token(token) for token in ids]


def cuts(text: str) -> Iterator[list[str]]:
    for places in itertools.product((False, True), repeat=max(len(text) - 1, 0)):
        pieces = [text[0]]
        for char, starts in zip(text[1:], places, strict=True):
            if starts:
                pieces.append(char)
            else:
                pieces[-1] += char
        yield pieces


def test_the_best_of_all_ways() -> None:
    rng = random.Random(1)
    words = {"".join(rng.choices("ab ", k=rng.randrange(1, 5))) for _ in range(40)} - {"b"}
    scores = {word: -10 * rng.random() for word in sorted(words)}
    tokenizer = plamo(scores)
    for length in range(1, 9):
        for _ in range(20):
            text = "".join(rng.choices("ab ", k=length))
            costs = {
                tuple(pieces): sum(scores.get(piece, -1000) for piece in pieces)
                for pieces in cuts(text)
                if all(piece in scores or len(piece) == 1 for piece in pieces)
            }
            best = max(costs, key=costs.__getitem__)
            assert texts_of(tokenizer, text) == [
                piece if piece in scores else f"<0x{ord(piece):02X}>" for piece in best
            ]
            assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_ties_and_scores_as_in_llama_cpp() -> None:
    """The ids that llama.cpp gives: the longer token of equal ways; a score may be too low."""
    tokenizer = plamo({"a": -1.0, "aa": -2.0, "ab": -3.0, "b": -2.0, "low": -2500.0, "l": -900.0})
    assert texts_of(tokenizer, "aaab") == ["aa", "ab"]
    assert texts_of(tokenizer, "low") == ["l", "<0x6F>", "<0x77>"]
    assert texts_of(tokenizer, "é漢") == ["<0xC3>", "<0xA9>", "<0xE6>", "<0xBC>", "<0xA2>"]
    assert texts_of(tokenizer, "\ufeffa") == ["a"]


def test_special_ids() -> None:
    tokenizer = plamo({"a": -1.0})
    assert (tokenizer.kind, tokenizer.bos_id, tokenizer.eos_id) == ("plamo", 1, 2)
    assert tokenizer.eog_ids == {2}
    assert tokenizer.encode("") == []
    assert tokenizer.encode("a<|plamo:eos|>", parse_special=True)[-1] == 2
    plain = tokenizer.encode("a<|plamo:eos|>")
    assert 2 not in plain
    assert tokenizer.decode(plain) == "a<|plamo:eos|>"
    assert plamo({"a": -1.0}, add_bos_token=True).encode("a")[0] == 1


def test_no_use_for_a_pre_tokenizer() -> None:
    tokenizer = plamo({"a": -1.0})
    metadata = Metadata({"tokenizer.ggml.model": "plamo2", "tokenizer.ggml.tokens": ["a"]})
    with pytest.raises(UsageError, match="the tokenizer is PLaMo's"):
        tokenizer_from_metadata(metadata.with_overrides(Overrides({PRE: "qwen2"})))
    assert tokenizer.pre == "default"


def test_bytes_without_a_token() -> None:
    tokenizer = tokenizer_from_metadata(
        Metadata({"tokenizer.ggml.model": "plamo2", "tokenizer.ggml.tokens": [*HEAD, "a"]})
    )
    with pytest.raises(ModelFileError, match="it has no token <0x00>"):
        tokenizer.encode("a")


def test_a_token_that_would_fill_the_memory() -> None:
    with pytest.raises(ModelFileError, match="of up to 100000 characters"):
        plamo({"a" * 10**5: -1.0}).encode("a")
