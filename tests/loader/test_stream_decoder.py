"""Text that grows token by token."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.errors import UsageError
from localkv.loader.tokenizer import Tokenizer, tokenizer_from_metadata
from support.tiny_vocabulary import bpe_metadata, spm_metadata, spm_model

KINDS = ("spm", "bpe")


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "spm":
        model = spm_model(user_defined=("<sep>",))
        return tokenizer_from_metadata(spm_metadata(model, user_defined=("<sep>",)))
    return tokenizer_from_metadata(bpe_metadata(user_defined=("<sep>",)))


def stream(tokenizer: Tokenizer, ids: list[int], skip_special: bool = False) -> list[str]:
    decoder = tokenizer.stream_decoder(skip_special=skip_special)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(numbers=st.lists(st.integers(0, 2**16)), skip_special=st.booleans())
def test_pieces_joined_are_the_decoded_text(
    kind: str, numbers: list[int], skip_special: bool
) -> None:
    """For any tokens, so for any bytes."""
    tokenizer = tokenizer_of(kind)
    ids = [number % tokenizer.n_vocab for number in numbers]
    assert "".join(stream(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text())
def test_characters_are_never_broken(kind: str, text: str) -> None:
    """A text without U+FFFD is never shown with one, and no piece is late."""
    text = text.replace("▁", "_").replace("\ufffd", "?")
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    for n in range(len(ids)):
        complete = tokenizer.decode(ids[:n]).rstrip("\ufffd")
        assert "".join(pieces[:n]) == complete


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_bytes(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    first, second, *_ = tokenizer.encode("\U0010ffff", add_special=False)[-4:]
    a = tokenizer.encode("<sep>", add_special=False)[0]
    decoder = tokenizer.stream_decoder()
    assert decoder.push(first) == ""
    assert decoder.push(second) == ""
    assert decoder.push(a) == "\ufffd<sep>"  # now it is clear
    assert decoder.push(first) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.push(a) == "<sep>"


def test_a_text_that_goes_on_keeps_its_space() -> None:
    tokenizer = tokenizer_of("spm")
    prompt, answer = "the cat", tokenizer.encode("the dog", add_special=False)
    ids = tokenizer.encode(prompt)
    decoder = tokenizer.stream_decoder(after=ids)
    assert "".join(map(decoder.push, answer)) == " the dog"
    assert tokenizer.decode(ids + answer, skip_special=True) == "the cat the dog"
    after_markup = tokenizer.stream_decoder(after=tokenizer.encode("the<s>", parse_special=True))
    assert "".join(map(after_markup.push, answer)) == "the dog"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    bos = tokenizer.bos_id
    assert bos is not None
    ids = [bos, *tokenizer.encode("the<sep>cat", add_special=False), bos]
    text = tokenizer.id_to_token(bos)
    assert "".join(stream(tokenizer, ids)) == f"{text}the<sep>cat{text}"
    assert "".join(stream(tokenizer, ids, skip_special=True)) == "the<sep>cat"


def test_no_such_token() -> None:
    with pytest.raises(UsageError):
        tokenizer_of("bpe").stream_decoder().push(10**9)


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_that_are_kept(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    bos, eos = tokenizer.bos_id, tokenizer.n_vocab - 2 if kind == "bpe" else tokenizer.eos_id
    assert bos is not None
    assert eos is not None
    decoder = tokenizer.stream_decoder(skip_special=True, kept={eos})
    assert decoder.push(bos) == ""
    assert decoder.push(eos) == tokenizer.id_to_token(eos)
