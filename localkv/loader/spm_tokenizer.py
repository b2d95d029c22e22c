"""SentencePiece BPE: ids of a piece of plain text, through the `sentencepiece` library.

A GGUF file holds the pieces, scores and types of a SentencePiece model, and no merges: the pair
that makes the token with the highest score is merged first, the leftmost of equals. The model is
put together again in SentencePiece's own file format (`sentencepiece_model.proto`), so that the
original program does that. Special tokens are out of a text by then
(`localkv.loader.tokenizer`), and this file keeps them unreachable.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable

from localkv.errors import ModelFileError
from localkv.loader.token_types import BYTE_TEXTS, SPACE, TokenType
from localkv.loader.vocabulary import Vocabulary

_BPE = 2  # TrainerSpec.ModelType


def spm_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """A function from text to ids. It yields no control token for any text.

    A character without a token becomes its UTF-8 bytes, or the unknown token in a vocabulary
    without byte tokens (where llama.cpp fails), or nothing if there is none either.

    Raises:
        ModelFileError: SentencePiece refuses the vocabulary.
    """
    with warnings.catch_warnings():
        # Its SWIG wrapper defines types in a way that Python 3.12 and later complain about.
        warnings.simplefilter("ignore", DeprecationWarning)
        from sentencepiece import SentencePieceProcessor

    try:
        processor = SentencePieceProcessor(model_proto=_model_proto(vocabulary))
    except RuntimeError as error:
        raise ModelFileError(
            f"the tokenizer is malformed: {' '.join(str(error).split())}"
        ) from None
    n_vocab = len(vocabulary.tokens)

    def encode(text: str) -> list[int]:
        ids: list[int] = processor.encode(text)
        if max(ids, default=0) >= n_vocab:
            return [token for token in ids if token < n_vocab]
        return ids

    return encode


def _model_proto(vocabulary: Vocabulary) -> bytes:
    tokens, types, unk_id = vocabulary.tokens, vocabulary.types, vocabulary.unk_id
    has_bytes = all(text in vocabulary.ids for text in BYTE_TEXTS)
    byte_ids = {vocabulary.ids[text] for text in BYTE_TEXTS} if has_bytes else set()
    # SentencePiece wants exactly one unknown piece.
    if unk_id is None or types[unk_id] not in (TokenType.UNKNOWN, TokenType.CONTROL):
        unk_id = len(tokens)
    pieces = []
    names = set(tokens)
    for token, text in enumerate([*tokens, ""] if unk_id == len(tokens) else tokens):
        if token in byte_ids:
            piece_type = TokenType.BYTE
        elif token == unk_id:
            piece_type = TokenType.UNKNOWN
        elif vocabulary.ids[text] != token or "\0" in text:
            piece_type = TokenType.CONTROL  # SentencePiece would refuse it
        elif types[token] in (TokenType.NORMAL, TokenType.USER_DEFINED):
            # Those that users defined are matched before; to the merges they are like any other.
            piece_type = TokenType.NORMAL
        elif types[token] == TokenType.UNUSED:
            piece_type = TokenType.UNUSED
        else:
            piece_type = TokenType.CONTROL
        score = vocabulary.scores[token] if token < len(tokens) else 0.0
        if piece_type in (TokenType.UNKNOWN, TokenType.CONTROL):
            # Any name, as long as it is no piece's and too long for a single character.
            text = f"<special {token}>"
            while text in names:
                text += ">"
        body = _bytes_field(1, text.encode("utf-8", errors="replace"))
        pieces.append(
            _bytes_field(1, body + b"\x15" + struct.pack("<f", score) + _int_field(3, piece_type))
        )
    trainer = _int_field(3, _BPE) + _int_field(35, has_bytes)
    normalizer = _int_field(3, False) + _int_field(4, False) + _int_field(5, True)
    return b"".join(pieces) + _bytes_field(2, trainer) + _bytes_field(3, normalizer)


def _int_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def spm_token_bytes(text: str, token_type: int) -> bytes:
    """The bytes that a token stands for (`token_to_piece` of llama.cpp)."""
    if token_type == TokenType.BYTE:
        try:
            return bytes((int(text[3:5], 16),))
        except ValueError:
            return b""
    return text.replace(SPACE, " ").encode("utf-8", errors="replace")
