"""The header of a GGUF file that keeps the keys of another.

Keys are copied as the bytes that they are, so nothing of them is lost, whatever their type and
size. gguf-py's writer (`gguf_writer.py`) packs each item of an array by itself: for the 262,144
tokens of a Gemma that takes seconds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from localkv.loader.gguf_file import map_file
from localkv.loader.gguf_header import MAX_KEYS, MAX_TENSORS, HeaderReader
from localkv.quant_formats import QuantFormat

VERSION = 3
DEFAULT_ALIGNMENT = 32
_U16, _U32, _I32, _F32, _STRING, _ARRAY = 2, 4, 5, 6, 8, 9

Keys = dict[str, bytes]
"""By name, the type of a value and the value as they are in a file, in their order."""


def string_bytes(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def u16(value: int) -> bytes:
    """A value for `Keys`, as the further functions here."""
    return struct.pack("<IH", _U16, value)


def u32(value: int) -> bytes:
    return struct.pack("<II", _U32, value)


def i32(value: int) -> bytes:
    return struct.pack("<Ii", _I32, value)


def f32(value: float) -> bytes:
    return struct.pack("<If", _F32, value)


def text(value: str) -> bytes:
    return struct.pack("<I", _STRING) + string_bytes(value)


def texts(values: Sequence[str]) -> bytes:
    head = struct.pack("<IIQ", _ARRAY, _STRING, len(values))
    return head + b"".join(map(string_bytes, values))


def read_keys(path: Path) -> Keys:
    """The keys of one file.

    Raises:
        ModelFileError: the file is missing, or its keys are malformed.
    """
    data = map_file(path).data
    header = HeaderReader(data, path)
    header.read_version()
    header.read_count("tensors", item_bytes=32, limit=MAX_TENSORS)
    keys: Keys = {}
    for _ in range(header.read_count("keys", item_bytes=13, limit=MAX_KEYS)):
        key = header.read_name("a key")
        start = header.position
        header.read_value(key)
        keys[key] = data[start : header.position]
    return keys


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written: its shape is row-major, as everywhere."""

    name: str
    shape: tuple[int, ...]
    format: QuantFormat

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.format.row_bytes(self.shape[-1])


@dataclass(frozen=True)
class NewFile:
    """A file to be written: its header, and its tensors in the order of their bytes."""

    keys: Keys
    tensors: Sequence[NewTensor]
    alignment: int = DEFAULT_ALIGNMENT

    def _padded(self, n_bytes: int) -> int:
        return -(-n_bytes // self.alignment) * self.alignment

    def header(self) -> bytes:
        """All that comes before the tensors' bytes."""
        parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(self.tensors), len(self.keys))]
        for key, value in self.keys.items():
            parts += [string_bytes(key), value]
        offset = 0
        for tensor in self.tensors:
            dims = tensor.shape[::-1]
            parts += [
                string_bytes(tensor.name),
                struct.pack(f"<I{len(dims)}Q", len(dims), *dims),
                struct.pack("<IQ", tensor.format.ggml_type, offset),
            ]
            offset += self._padded(tensor.n_bytes)
        header = b"".join(parts)
        return header.ljust(self._padded(len(header)), b"\0")

    @property
    def n_bytes(self) -> int:
        return len(self.header()) + sum(self._padded(tensor.n_bytes) for tensor in self.tensors)

    def pad(self, file: BinaryIO, tensor: NewTensor) -> None:
        """Write the zeros after a tensor's bytes."""
        file.write(bytes(self._padded(tensor.n_bytes) - tensor.n_bytes))
