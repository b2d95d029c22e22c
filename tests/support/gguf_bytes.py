"""Writes GGUF files byte by byte and remembers where each field is, so that tests can break one.

Files that are merely unusual are written with `gguf.GGUFWriter`; this is for what it refuses.
"""

from __future__ import annotations

import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


@dataclass
class GGUFBytes:
    """A file under construction.

    Attributes:
        data: the bytes so far.
        fields: label -> (offset, struct format) of every number that says how to read the rest.
    """

    data: bytearray = field(default_factory=bytearray)
    fields: dict[str, tuple[int, str]] = field(default_factory=dict)

    def number(self, code: str, value: float, label: str | None = None) -> None:
        if label is not None:
            assert label not in self.fields, label
            self.fields[label] = (len(self.data), f"<{code}")
        self.data += struct.pack(f"<{code}", value)

    def string(self, text: str | bytes, label: str) -> None:
        encoded = text if isinstance(text, bytes) else text.encode()
        self.number("Q", len(encoded), f"{label} length")
        self.data += encoded

    def value(self, value_type: int, value: object, label: str) -> None:
        """`value` of an array: (item type, items)."""
        if value_type == STRING:
            self.string(value, label)
        elif value_type == ARRAY:
            item_type, items = value
            self.number("I", item_type, f"{label} item type")
            self.number("Q", len(items), f"{label} count")
            for i, item in enumerate(items):
                self.value(item_type, item, f"{label}[{i}]")
        else:
            self.number(
                SCALARS[value_type], value, f"{label} value" if value_type == BOOL else None
            )

    def patched(self, label: str, value: int) -> bytes:
        """The bytes, with one field changed."""
        offset, code = self.fields[label]
        changed = bytearray(self.data)
        struct.pack_into(code, changed, offset, value)
        return bytes(changed)


@dataclass
class Tensor:
    """An entry of the tensor table, `ne` in ggml's order; the offset is the next free one."""

    name: str
    ne: tuple[int, ...]
    ggml_type: int
    data: bytes
    offset: int | None = None


def gguf_bytes(
    metadata: list[tuple[str | bytes, int, object]],
    tensors: list[Tensor] = [],  # noqa: B006 (never written to)
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
) -> GGUFBytes:
    """A whole file; each tensor's data is padded to `alignment`."""
    file = GGUFBytes(bytearray(magic))
    file.number("I", version, "version")
    file.number("Q", len(tensors), "tensor count")
    file.number("Q", len(metadata), "key count")
    for i, (key, value_type, value) in enumerate(metadata):
        file.string(key, f"key {i}")
        file.number("I", value_type, f"key {i} type")
        file.value(value_type, value, f"key {i} value")
    offset = 0
    for i, tensor in enumerate(tensors):
        file.string(tensor.name, f"tensor {i}")
        file.number("I", len(tensor.ne), f"tensor {i} dims")
        for j, n in enumerate(tensor.ne):
            file.number("Q", n, f"tensor {i} ne{j}")
        file.number("I", tensor.ggml_type, f"tensor {i} type")
        file.number("Q", offset if tensor.offset is None else tensor.offset, f"tensor {i} offset")
        offset += -(-len(tensor.data) // alignment) * alignment
    for tensor in tensors:
        file.data += bytes(-len(file.data) % alignment)
        file.data += tensor.data
    return file


def spoil(model: Path, tensor: str, goal: Path, byte: int) -> Path:
    """A copy of a model with a NaN in half precision at a byte of a tensor."""
    offset = next(t.data_offset for t in gguf.GGUFReader(model).tensors if t.name == tensor)
    shutil.copy(model, goal)
    with goal.open("r+b") as file:
        file.seek(offset + byte)
        file.write(np.float16(np.nan).tobytes())
    return goal
