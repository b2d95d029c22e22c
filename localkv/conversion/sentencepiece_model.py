"""A SentencePiece model's file (`sentencepiece_model.proto`), as far as GGUF files hold it.

The file is Protocol Buffers: fields with a number and a kind, in any order. Lengths are compared
with what is left, so a damaged file costs one line.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from localkv.errors import ModelFileError, byte_size, printable

UNIGRAM, BPE = 1, 2
"""`TrainerSpec.ModelType`."""
NORMAL = 1
"""`SentencePiece.Type`, whose numbers are also `tokenizer.ggml.token_type`'s."""
MOST_BYTES, MOST_PIECES = 1 << 26, 1 << 22

Field = tuple[int, int | bytes]


@dataclass
class SentencePieceModel:
    """A vocabulary.

    Attributes:
        pieces: text, score and type of each token.
        kind: `UNIGRAM` or `BPE`.
        charsmap: the compiled map of characters; nothing for none.
        adds_space: a space is put before a text.
        merges_spaces: spaces at the ends are left out, and several count as one.
    """

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    kind: int = UNIGRAM
    charsmap: bytes = b""
    adds_space: bool = True
    merges_spaces: bool = True


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a model.

    Raises:
        ModelFileError: it can't be read, or is malformed.
    """
    name = printable(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ModelFileError(f"{name}: more than {byte_size(MOST_BYTES)}")
        data = path.read_bytes()
        model = SentencePieceModel()
        for number, value in _fields(data):
            if number == 1:
                model.pieces.append(_piece(_message(value)))
                if len(model.pieces) > MOST_PIECES:
                    raise ModelFileError(f"{name}: more than {MOST_PIECES} tokens")
            elif number == 2:
                model.kind = int(dict(_fields(_message(value))).get(3, UNIGRAM))
            elif number == 3:
                spec = dict(_fields(_message(value)))
                model.charsmap = _message(spec.get(2, b""))
                model.adds_space = bool(spec.get(3, 1))
                model.merges_spaces = bool(spec.get(4, 1))
    except OSError as error:
        raise ModelFileError(f"{name}: {error.strerror}") from None
    except (ValueError, struct.error) as error:
        raise ModelFileError(f"{name}: not a SentencePiece model: {error}") from None
    if not model.pieces:
        raise ModelFileError(f"{name}: a SentencePiece model without tokens")
    return model


def _piece(data: bytes) -> tuple[str, float, int]:
    values = dict(_fields(data))
    (score,) = struct.unpack("<f", _message(values.get(2, bytes(4))))
    return _message(values.get(1, b"")).decode(), score, int(values.get(3, NORMAL))


def _message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has another kind")
    return value


def _fields(data: bytes) -> Iterator[Field]:
    """Numbers and values of the fields of a message: integers, or bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if kind == 2:
            size, position = _varint(data, position)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if size > len(data) - position:
            raise ValueError("it ends within a field")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """An integer in groups of seven bits, and where the next field begins."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        value, position = value | (byte & 127) << shift, position + 1
        if byte < 128:
            return value, position
    raise ValueError("it ends within a number")
