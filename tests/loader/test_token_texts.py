"""Texts that are read where they are in the file, against plain lists and dictionaries."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.errors import ModelFileError
from localkv.loader import gguf_header
from localkv.loader import tokenizer as tokenizers
from localkv.loader.gguf_header import HeaderReader, LazyArray, Strings
from localkv.loader.metadata import Metadata
from localkv.loader.token_texts import MergeTexts, TokenTexts
from localkv.loader.tokenizer import Tokenizer, bpe_encoder, spm_encoder, tokenizer_from_metadata
from support.tiny_vocabulary import CORPUS, bpe_metadata, spm_metadata, spm_model

RAW = (
    st.binary(max_size=12)
    | st.sampled_from([b"", b"\0", b" ", b"\xff", b"\xef\xbf\xbd", b"[EMPTY_0]", b"[EMPTY_3]"])
    | st.text("ab\u2581 é", max_size=12).map(str.encode)
    | st.integers(250, 260).map(lambda n: b"x" * n)
    | st.just(bytes(7) + b"\1" + bytes(9))
)


def header_array(raw: Sequence[bytes], more: bytes = b"") -> tuple[LazyArray, HeaderReader]:
    items = b"".join(struct.pack("<Q", len(one)) + one for one in raw)
    data = struct.pack("<IIQ", 9, 8, len(raw)) + items + more
    reader = HeaderReader(data, Path("some.gguf"))
    value = reader.read_value("key")
    assert isinstance(value, LazyArray)
    assert reader.position == len(data) - len(more)
    return value, reader


def named(raw: Sequence[bytes]) -> list[str]:
    texts = [one.decode("utf-8", errors="replace") for one in raw]
    return [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]


@given(st.lists(RAW, max_size=300), st.integers(1, 64), st.binary(max_size=300))
def test_strings_of_a_header(raw: list[bytes], one_by_one: int, more: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_header, "_FEW_STRINGS", one_by_one)
        patch.setattr(gguf_header, "_FEW_BYTES", 16 * one_by_one)
        array, _ = header_array(raw * 3, more)
    assert array.decode() == [one.decode("utf-8", errors="replace") for one in raw * 3]


@given(st.lists(RAW, min_size=100, max_size=200), st.data())
def test_strings_that_end_too_early(raw: list[bytes], data: st.DataObject) -> None:
    items = b"".join(struct.pack("<Q", len(one)) + one for one in raw)
    whole = struct.pack("<IIQ", 9, 8, len(raw)) + items
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ModelFileError, match="truncated"):
        HeaderReader(whole[:cut], Path("some.gguf")).read_value("key")


def test_many_strings() -> None:
    raw = [b"%d" % i * (i % 40) for i in range(200_000)]
    array, _ = header_array(raw, bytes(64))
    assert array.decode() == [one.decode() for one in raw]


@given(st.lists(RAW, max_size=40), st.lists(RAW, max_size=10))
def test_tokens_of_texts(raw: list[bytes], others: list[bytes]) -> None:
    strings = header_array(raw)[0].strings()
    assert strings is not None
    plain = named(raw)
    ids = {text: i for i, text in reversed([*enumerate(plain)])}
    texts = TokenTexts(strings)
    asked = [*plain, *named(others), "\ud800", "[EMPTY_1]", ""]
    assert [texts.find(text) for text in asked] == [ids.get(text) for text in asked]
    found = {text for text in asked if texts.can_find(text)}
    assert texts.find_all(found) == {text: ids[text] for text in found if text in ids}
    assert [texts[i] for i in range(len(raw))] == plain == [*texts] == texts.some(range(len(raw)))
    assert texts.ids == ids
    texts._found |= dict.fromkeys(map(str, range(300)))
    assert [texts.find(text) for text in asked] == [ids.get(text) for text in asked]


@given(st.lists(RAW, max_size=40), st.text("ab\u2581 é\0x", max_size=300))
def test_tokens_within_a_text(raw: list[bytes], text: str) -> None:
    texts = TokenTexts(header_array(raw)[0].strings() or Strings.of([]))
    expected = [i for i, one in enumerate(raw) if one and one in text.encode()]
    assert [i for i in texts.within(text) if raw[i]] == expected


@given(
    st.lists(st.text("ab é", max_size=12) | st.text("abcdefghi ", max_size=24), max_size=40),
    st.text("ab é", max_size=60) | st.text("abcdefghi", max_size=60),
)
def test_merges_within_a_text(merges: list[str], text: str) -> None:
    texts = MergeTexts(Strings.of(merges))
    pairs = [(one[:at], one[at + 1 :]) for one in merges if (at := one.find(" ", 1)) > 0]
    assert texts.every() == pairs
    within = texts.within(text)
    assert [pair for pair in pairs if pair in within] == within
    assert {pair for pair in pairs if "".join(pair) in text} <= {*within}


@given(st.lists(RAW, min_size=1, max_size=20))
def test_plain_texts(raw: list[bytes]) -> None:
    texts = TokenTexts(header_array(raw)[0].strings() or Strings.of([]))
    is_utf8 = all(one.decode(errors="ignore").encode() == one for one in raw)
    has_nul = b"\0" in b"".join(raw)
    assert texts.are_plain() == (is_utf8 and not has_nul and all(raw) and len({*raw}) == len(raw))


ODD = ["\0", "\u2581", "the", "the", "", "x\0y", "<special 5>", "a" * 200, "<s>", "quick"]


def metadata_of(kind: str, odd: bool) -> Metadata:
    if kind == "bpe":
        return bpe_metadata("llama-bpe", user_defined=ODD if odd else ())
    if kind == "gemma4":
        values = dict(spm_metadata(spm_model(), control=ODD if odd else ()))
        tokens = values["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        halves = ((text[:at], text[at:]) for text in tokens for at in range(1, len(text)))
        merges = [f"{a} {b}" for a, b in halves if a in tokens and b in tokens]
        more = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
        return Metadata(values | more)
    return spm_metadata(spm_model(kind == "spm"), control=ODD if odd else ())


TEXTS = st.text(max_size=40) | st.text(CORPUS, max_size=60) | st.sampled_from(CORPUS.splitlines())


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("kind", ["spm", "spm without bytes", "bpe", "gemma4"])
def test_an_encoder_of_a_part_encodes_it_as_one_of_all_texts(kind: str, odd: bool) -> None:
    vocabulary = tokenizer_from_metadata(metadata_of(kind, odd))._vocabulary
    encoder = bpe_encoder if vocabulary.kind == "bpe" else spm_encoder
    whole = encoder(vocabulary)

    @given(TEXTS, TEXTS)
    def check(before: str, text: str) -> None:
        text = text.replace("\ufffd", "")
        part = encoder(vocabulary, before.replace("\ufffd", "") + text)
        assert part(text) == whole(text)

    check()


@pytest.mark.parametrize("types", [0, 1])
@pytest.mark.parametrize("kind", ["spm", "spm without bytes"])
def test_a_model_made_all_at_once(kind: str, types: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sentencepiece import SentencePieceProcessor

    vocabulary = tokenizer_from_metadata(metadata_of(kind, odd=False))._vocabulary
    if types:
        changed = bytearray(vocabulary.types)
        changed[300:360] = bytes([3, 4, 5, 1, 2, 0] * 10)
        vocabulary = replace(vocabulary, types=changed, unk_id=None)
    assert vocabulary.tokens.are_plain()
    quick = SentencePieceProcessor(model_proto=tokenizers._model_proto(vocabulary, None)[0])
    monkeypatch.setattr(tokenizers, "_plain_pieces", lambda *_: None)
    plain = SentencePieceProcessor(model_proto=tokenizers._model_proto(vocabulary, None)[0])
    for name in ("id_to_piece", "get_score", "is_unknown", "is_control", "is_byte", "is_unused"):
        every = range(plain.get_piece_size())
        assert [*map(getattr(quick, name), every)] == [*map(getattr(plain, name), every)]


@pytest.mark.parametrize("kind", ["spm", "bpe"])
def test_short_texts_wait_for_no_encoder_of_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_LARGE", 1)
    metadata = metadata_of(kind, odd=False)
    quick, plain = (tokenizer_from_metadata(metadata) for _ in range(2))

    def same(text: str) -> None:
        monkeypatch.setattr(tokenizers, "_LARGE", 1)
        found = quick.encode(text, parse_special=True)
        monkeypatch.setattr(tokenizers, "_LARGE", 1 << 20)
        assert found == plain.encode(text, parse_special=True)

    same("The cat sat on the mat.<s> The dog<|im_end|> it's")
    same("The cat sat")
    assert (quick._encode is None, len(quick._partial_encoders)) == (True, 1)
    for word in ("quick", "brown", "fox", "a\ufffdb"):
        same(word)
    assert isinstance(quick, Tokenizer)
    assert quick._encode is not None
    same(CORPUS)
    assert quick.read_seconds > 0
    later = tokenizer_from_metadata(metadata)
    later.prepare()
    assert later.encode("The cat sat") == plain.encode("The cat sat")
    assert not later._partial_encoders
