"""BPE by a list of merges: ids of a piece of plain text, through Hugging Face's `tokenizers`.

Merges are of bytes, in GPT-2's alphabet, or of characters, with SentencePiece's way to write spaces
and bytes.

It knows nothing about special tokens, which `localkv.loader.tokenizer` takes out of a text first,
nor which expressions belong to which model (`localkv.loader.pre_tokenizers`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import TYPE_CHECKING

from localkv.loader.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from localkv.loader.token_types import BYTE_TEXTS, SPACE, TokenType
from localkv.loader.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer as Step

LONG = 4096
"""Least characters of a text that is cut into tokens while other threads go on."""

_UNREACHABLE = frozenset((TokenType.CONTROL, TokenType.UNKNOWN))


def bpe_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """A function from text to ids. It yields no control token for any text.

    A byte without a token is left out, as in llama.cpp; the vocabularies in use have all 256.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    family = PRE_TOKENIZERS[vocabulary.pre]
    ids = _reachable_ids(vocabulary)
    # Bytes without a token are left out after the merging: before, their neighbours could merge.
    n_vocab, missing = len(vocabulary.tokens), "<no token>"
    names = BYTE_TEXTS if family.of_characters else _byte_of_character()
    has_all_bytes = all(name in ids for name in names)
    if not has_all_bytes:
        ids[missing] = n_vocab
    unk_token = None if has_all_bytes else missing
    steps = [] if family.of_characters else [ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer = _tokenizer(family, ids, vocabulary.merges, unk_token, steps)

    def encode(text: str) -> list[int]:
        if len(text) < LONG:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        else:
            found = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return found if has_all_bytes else [token for token in found if token < n_vocab]

    if not family.of_characters:
        return encode
    line_breaks = re.compile(r"(\n+)")

    def encode_characters(text: str) -> list[int]:
        text = text.replace(" ", SPACE)
        if not family.newline_tokens:
            return encode(text)
        found: list[int] = []
        for piece in filter(None, line_breaks.split(text)):
            is_token = piece[0] == "\n" and piece in ids
            found += (ids[piece],) if is_token else encode(piece)
        return found

    return encode_characters


def _reachable_ids(vocabulary: Vocabulary) -> dict[str, int]:
    types = vocabulary.types
    return {text: i for text, i in vocabulary.ids.items() if types[i] not in _UNREACHABLE}


def _tokenizer(
    family: PreTokenizer,
    ids: dict[str, int],
    merges: Collection[str],
    unk_token: str | None,
    steps: Iterable[Step],
) -> Tokenizer:
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import Sequence, Split

    pairs = [
        (merge[:space], merge[space + 1 :]) for merge in merges if (space := merge.find(" ", 1)) > 0
    ]
    options = {
        "unk_token": unk_token,
        "ignore_merges": family.ignore_merges,
        "byte_fallback": family.of_characters,
    }
    try:
        model = BPE(ids, pairs, **options)
    except Exception:  # `tokenizers` refuses merges of or into unknown tokens
        pairs = [(a, b) for a, b in pairs if a in ids and b in ids and a + b in ids]
        model = BPE(ids, pairs, **options)
    tokenizer = Tokenizer(model)
    splits = [Split(Regex(regex), "isolated") for regex in family.regexes]
    tokenizer.pre_tokenizer = Sequence([*splits, *steps])
    return tokenizer


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: bytes that print stand for themselves, the others for U+0100 onwards."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def bpe_token_bytes(text: str) -> bytes:
    """The bytes that a token's text stands for; a text outside the alphabet stands for itself."""
    alphabet = _byte_of_character()
    try:
        return bytes(alphabet[character] for character in text)
    except KeyError:
        return text.encode("utf-8", errors="replace")
