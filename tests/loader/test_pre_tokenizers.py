"""How texts are cut before merging, against what llama.cpp made of the same texts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from localkv.errors import ModelFileError
from localkv.loader.metadata import Metadata
from localkv.loader.pre_tokenizers import PRE_TOKENIZERS
from localkv.loader.tokenizer import Tokenizer, tokenizer_from_metadata

RECORDED = json.loads(
    (Path(__file__).parent.parent / "data" / "llama_cpp_pre_tokenizers.json").read_text()
)
NAMES = {name: family for family in RECORDED["families"] for name in family["names"]}


def tokenizer(family: str, **more: Any) -> Tokenizer:
    kind = "characters" if PRE_TOKENIZERS[family].of_characters else "bytes"
    vocabulary = RECORDED["vocabularies"][kind]
    n_tokens = len(vocabulary["tokens"])
    values = {
        "model": "gpt2",
        "pre": family,
        **vocabulary,
        "bos_token_id": n_tokens - 2,
        "eos_token_id": n_tokens - 1,
        **more,
    }
    return tokenizer_from_metadata(
        Metadata({f"tokenizer.ggml.{key}": value for key, value in values.items() if value})
    )


def differences(found: Tokenizer, recorded: list[list[int]]) -> Iterator[tuple[str, list[str]]]:
    for text, ids in zip(RECORDED["texts"], recorded, strict=True):
        if found.encode(text) != ids:
            yield text, [found.token_bytes(token).decode(errors="replace") for token in ids]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_ids_of_llama_cpp(pre: str) -> None:
    assert list(differences(tokenizer(pre), NAMES[pre]["ids"])) == []


def test_families_differ() -> None:
    """So the texts tell one family from another, and from one without a part of it."""
    assert len(RECORDED["families"]) >= 30
    ids = [json.dumps([family["vocabulary"], family["ids"]]) for family in RECORDED["families"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("pre", ["afmoe", "superbpe", "tiny_aya"])
def test_digits_in_threes_from_the_right(pre: str) -> None:
    """However many: groups of 300 come first, so that each looks ahead no further."""
    splits = Sequence([Split(Regex(regex), "isolated") for regex in PRE_TOKENIZERS[pre].regexes])
    for n_digits in (*range(1, 13), *range(296, 306), 600, 601, 1202):
        first = n_digits % 3 or 3
        expected = [first, *[3] * ((n_digits - first) // 3)]
        for before, after in (("", ""), ("x", ""), ("", "y"), ("x", " y")):
            text = before + "7" * n_digits + after
            pieces = [piece for piece, _ in splits.pre_tokenize_str(text)]
            if pre == "superbpe":  # what it leaves together are texts, not digits
                pieces = [piece.strip("xy ") for piece in pieces]
            sizes = [len(piece) for piece in pieces if piece and set(piece) == {"7"}]
            assert sizes == expected, text


@pytest.mark.slow
def test_long_texts_without_a_word_are_fast() -> None:
    for pre in ("afmoe", "superbpe", "gemma4"):
        found = tokenizer(pre)
        found.encode("built on first use")
        for text in ("a" * 60_000, "1" * 60_000, "a 1 " * 10_000):
            start = time.perf_counter()
            found.encode(text)
            assert time.perf_counter() - start < 5  # some 0.1 s; a quadratic expression takes 10


@pytest.mark.parametrize("pre", ["gemma4", "sarvam-moe"])
def test_bpe_of_characters_gives_the_text_back(pre: str) -> None:
    found = tokenizer(pre)
    for text in [*RECORDED["texts"], " a", "a  b\n\n\n\n\nc", "\x00é\udfffx"]:
        ids = found.encode(text, add_special=False)
        assert found.decode(ids) == text.replace("\udfff", "\ufffd")
        stream = found.stream_decoder()
        assert "".join(map(stream.push, ids)) + stream.flush() == found.decode(ids)


def test_gemma_4_names_its_pre_tokenizer_by_its_model() -> None:
    for pre in (None, "gemma4", "llama-bpe"):
        found = tokenizer("gemma4", model="gemma4", pre=pre)
        assert (found.pre, found.warnings) == ("gemma4", ())
        assert list(differences(found, NAMES["gemma4"]["ids"])) == []


def test_gemma_4_has_bos_whatever_the_file_says() -> None:
    found = tokenizer("gemma4", add_bos_token=False)
    assert found.encode("Hello")[0] == found.bos_id


def test_line_breaks_that_are_a_token_are_not_merged() -> None:
    vocabulary = RECORDED["vocabularies"]["characters"]
    more = {
        "tokens": [*vocabulary["tokens"], "\n" * 7],
        "token_type": [*vocabulary["token_type"], 1],
    }
    last = len(vocabulary["tokens"])
    assert last in tokenizer("gemma4", **more).encode("Hello" + "\n" * 7 + "world")
    assert last not in tokenizer("sarvam-moe", **more).encode("Hello" + "\n" * 7 + "world")


def test_user_defined_tokens_with_escaped_spaces_stand_for_spaces() -> None:
    vocabulary = RECORDED["vocabularies"]["characters"]
    more = {"tokens": [*vocabulary["tokens"], "▁▁▁"], "token_type": [*vocabulary["token_type"], 4]}
    found = tokenizer("gemma4", **more)
    assert found.decode([found.n_vocab - 1]) == "   "


def test_kimi_k2_does_without_merges() -> None:
    found = tokenizer("kimi-k2", merges=None)
    assert found.decode(found.encode("Hello 漢字", add_special=False)) == "Hello 漢字"
    with pytest.raises(ModelFileError, match="merges"):
        tokenizer("qwen2", merges=None)


def test_suppressed_tokens() -> None:
    assert tokenizer("gemma4", suppress_tokens=[3, 5, -1, 10**6]).suppressed_ids == {3, 5}
