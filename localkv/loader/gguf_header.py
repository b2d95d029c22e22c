"""Reads the header of a GGUF file, and checks every length in it against the bytes that are there.

A model file comes from the internet. No length, count or offset in it is used before it has been
compared with the rest of the file, so a malformed file costs one line and no memory. The layout is
described in ggml's `docs/gguf.md` and `gguf.cpp`. The meaning of keys is not known here.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from localkv.errors import ModelFileError, printable, quoted
from localkv.quant_formats import WEIGHT_FORMATS, QuantFormat

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4

# Limits on a header's demands, far above any real one (a 262k-token tokenizer makes a header
# of 15 MiB, the largest mixtures of experts have some 30k tensors). They keep the worst file of any
# size to a few seconds.
_MAX_HEADER_BYTES = 1 << 27
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
_MAX_NAME_BYTES = (1 << 16) - 1
_MAX_NESTED_ARRAYS = 1 << 18
_MAX_ARRAY_DEPTH = 4

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: Final = {
    value_type: np.dtype(name)
    for value_type, name in {
        0: "<u1",
        1: "<i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        _BOOL: "<u1",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }.items()
}
_MIN_ITEM_BYTES = {_STRING: 8, _ARRAY: 12} | {t: dtype.itemsize for t, dtype in _SCALARS.items()}
_read_u32 = struct.Struct("<I").unpack_from
_read_u64 = struct.Struct("<Q").unpack_from

GGML_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
"""ggml's types by their numbers in a file (`ggml_type` in ggml.h), read by localkv or not."""


def ggml_type_name(number: int) -> str:
    """The name of a type, or its number where it has no name here."""
    return GGML_TYPE_NAMES.get(number, f"{number} (unknown)")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's place, shape and type.

    Attributes:
        name: as in the file.
        shape: row-major, ggml's `ne` reversed: the last axis runs along a row.
        format: how a row is packed.
        n_bytes: of all rows, without padding.
        offset: of the first byte, from the start of the file.
        part: index of the file that holds it, 0 unless the model is split.
    """

    name: str
    shape: tuple[int, ...]
    format: QuantFormat
    n_bytes: int
    offset: int
    part: int


class IncompleteFileError(ModelFileError):
    """A file ends before the data that it announces."""


class TruncatedError(IncompleteFileError):
    """The bytes end before the header does."""


class HeaderReader:
    """Reads a header from front to back, and checks each field against the bytes that are left.

    Args:
        data: the file, mapped; or its first bytes.
        path: its name, for messages.
    """

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.data = data
        self.position = 0
        self._path = path
        self._end = min(len(data), _MAX_HEADER_BYTES)
        self._nested_arrays = 0

    def error(self, message: str, hint: str | None = None) -> ModelFileError:
        return ModelFileError(f"{printable(self._path)}: {message}", hint)

    def read_version(self) -> int:
        magic = self.data[:4]
        if len(magic) < len(_MAGIC) and _MAGIC.startswith(bytes(magic)):
            raise self._truncated("the magic")
        if magic != _MAGIC:
            is_pointer = self.data[:16] == b"version https://"
            raise self.error(
                f"not a GGUF file: it starts with {magic!r}",
                hint="this is a Git LFS pointer: run `git lfs pull`" if is_pointer else None,
            )
        self.position = 4
        version = self._u32("the version")
        if version and version & 0xFFFF == 0:
            raise self.error("a big-endian GGUF file, only little-endian ones are supported")
        if version not in _VERSIONS:
            raise self.error(f"GGUF version {version} is not supported, versions 2 and 3 are")
        return version

    def read_count(self, what: str, item_bytes: int, limit: int) -> int:
        """A number of things that take at least `item_bytes` each."""
        count = self._u64(f"the number of {what}")
        if count > limit:
            raise self.error(f"{count} {what} declared, more than {limit}")
        if count * item_bytes > self._end - self.position:
            message = f"truncated: {count} {what} declared, which do not fit in the file"
            raise TruncatedError(self.error(message).message)
        return count

    def read_name(self, what: str) -> str:
        n_bytes = self._u64(f"the length of {what}")
        if n_bytes > _MAX_NAME_BYTES:
            raise self.error(f"{what} at byte {self.position} has an impossible length {n_bytes}")
        return self._string(n_bytes, what)

    def read_value(self, what: str) -> object:
        value_type = self._u32(f"the type of {what}")
        if value_type == _STRING:
            return self._string(self._u64(what), what)
        if value_type == _ARRAY:
            return self._array(what)
        dtype = self._scalar_type(value_type, what)
        start = self._advance(dtype.itemsize, what)
        value = np.frombuffer(self.data, dtype, count=1, offset=start).item()
        if value_type != _BOOL:
            return value
        if value > 1:
            raise self.error(f"{what} is a boolean of value {value}")
        return value == 1

    def read_tensor(self) -> TensorInfo:
        """One entry of the tensor table; its offset is still that from the start of the data."""
        name = self.read_name("a tensor's name")
        what = f"tensor {quoted(name)}"
        n_dims = self._u32(what)
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self.error(f"{what} has {n_dims} dimensions, expected 1 to {_MAX_DIMS}")
        shape = tuple(self._u64(what) for _ in range(n_dims))[::-1]
        ggml_type = self._u32(what)
        offset = self._u64(what)
        fmt = WEIGHT_FORMATS.get(ggml_type)
        if fmt is None:
            raise self.error(
                f"{what} is of type {ggml_type_name(ggml_type)}, which is not supported",
                hint="types that are: " + " ".join(fmt.name for fmt in WEIGHT_FORMATS.values()),
            )
        if 0 in shape:
            raise self.error(f"{what} has an empty shape {list(shape)}")
        if shape[-1] % fmt.block_size:
            raise self.error(
                f"{what} has rows of {shape[-1]} values, "
                f"which is not a multiple of {fmt.name}'s block of {fmt.block_size}"
            )
        n_bytes = math.prod(shape[:-1]) * fmt.row_bytes(shape[-1])
        return TensorInfo(name, shape, fmt, n_bytes, offset, part=0)

    def _array(self, what: str) -> LazyArray:
        start = self.position
        return LazyArray(self.data, start, self._skip_array(what, depth=1))

    def _skip_array(self, what: str, depth: int) -> npt.NDArray[np.int32] | None:
        """Step over an array; returns the places of strings (`_skip_strings`)."""
        item_type = self._u32(what)
        count = self._u64(what)
        if item_type not in _MIN_ITEM_BYTES:
            raise self.error(f"{what} is an array of an unknown type {item_type}")
        if count * _MIN_ITEM_BYTES[item_type] > self._end - self.position:
            raise self._truncated(f"{what}, an array of {count} items")
        if item_type == _STRING:
            return self._skip_strings(count, what)
        if item_type == _ARRAY:
            self._nested_arrays += count
            if depth == _MAX_ARRAY_DEPTH or self._nested_arrays > _MAX_NESTED_ARRAYS:
                raise self.error(f"{what} is an array of too many arrays")
            for _ in range(count):
                self._skip_array(what, depth + 1)
        else:
            dtype = _SCALARS[item_type]
            start = self._advance(count * dtype.itemsize, what)
            if item_type == _BOOL and count:
                largest = np.frombuffer(self.data, dtype, count=count, offset=start).max()
                if largest > 1:
                    raise self.error(f"{what} is an array with a boolean of value {largest}")
        return None

    def _skip_strings(self, count: int, what: str) -> npt.NDArray[np.int32]:
        """Step over strings; returns where the length of each is, and where the last one ends.

        This is the hot loop of opening a file, so it takes many strings at once. Seven zeros after
        another byte are most likely the length of a string, and surely so where a known string
        ends. Where that finds no length, the next strings are read one by one.
        """
        data, position, done = self.data, self.position, 0
        places = np.empty(count + 1, np.int32)
        one_by_one, n_bytes = _FEW_STRINGS, _FEW_BYTES
        try:
            while done < count:
                first, done = done, min(done + one_by_one, count)
                for i in range(first, done):
                    places[i] = position
                    position += int(_read_u64(data, position)[0]) + 8
                if done == count or self._end - position < _FEW_BYTES:
                    continue
                near = np.frombuffer(data, np.uint8, min(self._end - position, n_bytes), position)
                starts, ends = _likely_strings(near)
                n = 0
                if len(starts) and starts[0] == 0:
                    broken = np.flatnonzero(ends[:-1] != starts[1:])
                    n = min(int(broken[0]) + 1 if len(broken) else len(starts), count - done)
                    places[done : done + n] = position + starts[:n]
                    done, position = done + n, position + int(ends[n - 1])
                # More at once, or more one by one, as it turns out: an odd file takes no longer.
                is_whole = n and 2 * ends[n - 1] > len(near)
                n_bytes = min(2 * n_bytes, _MOST_BYTES) if is_whole else _FEW_BYTES
                one_by_one = _FEW_STRINGS if n >= _FEW_STRINGS else min(2 * one_by_one, 1 << 16)
        except (struct.error, OverflowError):
            raise self._truncated(what) from None
        if position > self._end:
            raise self._truncated(what)
        places[count] = self.position = position
        return places

    def _string(self, n_bytes: int, what: str) -> str:
        start = self._advance(n_bytes, what)
        return self.data[start : start + n_bytes].decode("utf-8", errors="replace")

    def _scalar_type(self, value_type: int, what: str) -> np.dtype[np.generic]:
        if value_type not in _SCALARS:
            raise self.error(f"{what} is of an unknown type {value_type}")
        return _SCALARS[value_type]

    def _u32(self, what: str) -> int:
        start = self._advance(4, what)
        return int(_read_u32(self.data, start)[0])

    def _u64(self, what: str) -> int:
        start = self._advance(8, what)
        return int(_read_u64(self.data, start)[0])

    def _advance(self, n_bytes: int, what: str) -> int:
        """Step over `n_bytes` that must be there; returns where they start."""
        start = self.position
        if n_bytes > self._end - start:
            raise self._truncated(what)
        self.position = start + n_bytes
        return start

    def _truncated(self, what: str) -> ModelFileError:
        if self._end < len(self.data):
            return self.error(f"the header is longer than {_MAX_HEADER_BYTES} bytes, at {what}")
        return TruncatedError(self.error(f"truncated: the file ends within {what}").message)


_FEW_STRINGS = 64
_FEW_BYTES, _MOST_BYTES = 1 << 12, 1 << 20


def _likely_strings(
    data: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where a string of 1 to 255 bytes may start with its length, and where it ends then."""
    is_zero = data == 0
    two = is_zero[1:] & is_zero[:-1]
    four = two[2:] & two[:-2]
    starts = np.flatnonzero(four[1:-3] & four[4:] & ~is_zero[:-7])
    return starts, starts + 8 + data[starts]


class LazyArray:
    """An array whose lengths have been checked, to be decoded when it is asked for.

    Args:
        data: the file.
        start: where the array is in it.
        places: of strings: where the length of each is, and where the last one ends.
    """

    def __init__(
        self, data: mmap.mmap | bytes, start: int, places: npt.NDArray[np.int32] | None = None
    ) -> None:
        self._data = data
        self._start = start
        self._places = places
        self._items: list[object] | None = None
        self._strings: Strings | None = None

    def decode(self) -> list[object]:
        """The items; the same list each time."""
        if self._items is None:
            strings = self.strings()
            if strings is None:
                self._items = self._decode(self._start)[0]
            else:
                self._items = cast("list[object]", strings.texts())
        return self._items

    def strings(self) -> Strings | None:
        """The items, still undecoded; None if they are not strings."""
        if self._strings is None and self._places is not None:
            first, last = int(self._places[0]), int(self._places[-1])
            places = self._places - first
            self._strings = Strings(self._data[first:last], places[:-1] + 8, places[1:])
        return self._strings

    def numbers(self) -> npt.NDArray[np.generic] | None:
        """The items, a view of the file; None if they are not numbers."""
        item_type = _read_u32(self._data, self._start)[0]
        if item_type not in _SCALARS or item_type == _BOOL:
            return None
        count = _read_u64(self._data, self._start + 4)[0]
        return np.frombuffer(self._data, _SCALARS[item_type], count, self._start + 12)

    def _decode(self, position: int) -> tuple[list[object], int]:
        """The items of the array at `position`, and the position after it."""
        data = self._data
        item_type = _read_u32(data, position)[0]
        count = _read_u64(data, position + 4)[0]
        position += 12
        items: list[object] = []
        if item_type == _STRING:
            read_u64, append = _read_u64, items.append
            for _ in range(count):
                start = position + 8
                position = start + read_u64(data, position)[0]
                append(data[start:position].decode("utf-8", errors="replace"))
        elif item_type == _ARRAY:
            for _ in range(count):
                item, position = self._decode(position)
                items.append(item)
        else:
            dtype = _SCALARS[item_type]
            values = np.frombuffer(data, dtype, count=count, offset=position)
            items = (values.astype(bool) if item_type == _BOOL else values).tolist()
            position += count * dtype.itemsize
        return items, position


class Strings:
    """Many strings of UTF-8 in one buffer, decoded one by one or all at once.

    Bytes that are no UTF-8 become U+FFFD.

    Attributes:
        data: the buffer.
        starts, ends: where each string is in it: int32 [n].
    """

    def __init__(
        self, data: bytes, starts: npt.NDArray[np.int32], ends: npt.NDArray[np.int32]
    ) -> None:
        self.data = data
        self.starts = starts
        self.ends = ends

    @classmethod
    def of(cls, texts: Sequence[str]) -> Strings:
        """Strings from Python's; a lone surrogate is kept as bytes that are no UTF-8."""
        every = [text.encode("utf-8", errors="surrogatepass") for text in texts]
        ends = np.cumsum([0, *map(len, every)], dtype=np.int32)
        return cls(b"".join(every), ends[:-1], ends[1:])

    def __len__(self) -> int:
        return len(self.starts)

    def raw(self, index: int) -> bytes:
        """The bytes of one string."""
        return self.data[self.starts[index] : self.ends[index]]

    def text(self, index: int) -> str:
        """One string."""
        return self.raw(index).decode("utf-8", errors="replace")

    def texts(self) -> list[str]:
        """All strings."""
        data = self.data
        pairs = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return [data[start:end].decode("utf-8", "replace") for start, end in pairs]
