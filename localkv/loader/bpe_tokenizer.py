"""Byte-level BPE: ids of a piece of plain text, through Hugging Face's `tokenizers`.

It knows nothing about special tokens, which `localkv.loader.tokenizer` takes out of a text first,
nor which expressions belong to which model (`localkv.loader.pre_tokenizers`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from localkv.loader.pre_tokenizers import PRE_TOKENIZERS
from localkv.loader.token_types import TokenType
from localkv.loader.vocabulary import Vocabulary

_UNREACHABLE = frozenset((TokenType.CONTROL, TokenType.UNKNOWN))


def bpe_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """A function from text to ids. It yields no control token for any text.

    A byte without a token is left out, as in llama.cpp; the vocabularies in use have all 256.
    """
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    family = PRE_TOKENIZERS[vocabulary.pre]
    types = vocabulary.types
    ids = {text: i for text, i in vocabulary.ids.items() if types[i] not in _UNREACHABLE}
    merges = [
        (merge[:space], merge[space + 1 :])
        for merge in vocabulary.merges
        if (space := merge.find(" ", 1)) > 0
    ]
    # Bytes without a token are left out after the merging: before, their neighbours could merge.
    n_vocab, missing = len(vocabulary.tokens), "<no token>"
    has_all_bytes = all(character in ids for character in _byte_of_character())
    if not has_all_bytes:
        ids[missing] = n_vocab
    unk_token = None if has_all_bytes else missing
    try:
        model = BPE(ids, merges, unk_token=unk_token, ignore_merges=family.ignore_merges)
    except Exception:  # `tokenizers` refuses merges of or into unknown tokens
        merges = [(a, b) for a, b in merges if a in ids and b in ids and a + b in ids]
        model = BPE(ids, merges, unk_token=unk_token, ignore_merges=family.ignore_merges)
    tokenizer = Tokenizer(model)
    splits = [Split(Regex(regex), "isolated") for regex in family.regexes]
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([*splits, byte_level])

    def encode(text: str) -> list[int]:
        found = tokenizer.encode(text, add_special_tokens=False).ids
        return found if has_all_bytes else [token for token in found if token < n_vocab]

    return encode


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
