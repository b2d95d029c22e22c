"""Opens a GGUF file: its metadata, and its tensors as packed bytes of the mapped file.

This file knows the container (versions 2 and 3, little endian, split files) and nothing about what
the keys mean, how a model is built from the tensors, or how their bytes decode. It is free of
torch. The layout is that of ggml's `docs/gguf.md` and `gguf.cpp`.

A model file comes from the internet: no length, count or offset in it is used before it has been
compared with the bytes that are there, so a malformed file costs one line and no memory.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import reprlib
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from localkv.errors import ModelFileError
from localkv.quant_formats import WEIGHT_FORMATS, QuantFormat

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4

# Limits on what a header may ask for, far above any real one (a 262k-token tokenizer makes a header
# of 15 MiB, the largest mixtures of experts have some 30k tensors). They keep the worst file of any
# size to a few seconds.
_MAX_HEADER_BYTES = 1 << 27
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 18
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

_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class _Required(Enum):
    """The default of a getter that has none."""

    REQUIRED = "required"


_REQUIRED: Final = _Required.REQUIRED
_Default = TypeVar("_Default")
_NoDefault = Literal[_Required.REQUIRED]


class Metadata(Mapping[str, object]):
    """Keys and values of a header, as Python's str, int, float, bool and lists of those.

    Arrays are decoded on first use: a tokenizer's are most of a header, and few callers want them.

    The getters check the type. They return `default` if the key is missing and raise
    `ModelFileError` if there is no default, or if the value is of another type. An empty array is
    an array of any type.

    Args:
        values: the decoded values; a value may be an array that is still to be decoded.
        source: the file, for error messages.
    """

    def __init__(self, values: Mapping[str, object], source: str = "metadata") -> None:
        self._values = dict(values)
        self._source = source

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = value.decode()
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Metadata of {self._source}: {len(self)} keys>"

    def string(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> str | _Default:
        """The value of `key`, a string."""
        return cast("str | _Default", self._scalar(key, default, (str,), "a string"))

    def integer(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> int | _Default:
        """The value of `key`, an integer of any width (a boolean is not one)."""
        return cast("int | _Default", self._scalar(key, default, (int,), "an integer"))

    def number(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> float | _Default:
        """The value of `key`, a float or an integer, as a float."""
        value = self._scalar(key, default, (float, int), "a number")
        return float(value) if type(value) is int else cast("float | _Default", value)

    def boolean(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> bool | _Default:
        """The value of `key`, a boolean."""
        return cast("bool | _Default", self._scalar(key, default, (bool,), "a boolean"))

    def strings(self, key: str, default: _Default | _NoDefault = _REQUIRED) -> list[str] | _Default:
        """The value of `key`, an array of strings."""
        values = self._array(key, default, {str}, "an array of strings")
        return cast("list[str] | _Default", values)

    def integers(
        self, key: str, default: _Default | _NoDefault = _REQUIRED
    ) -> list[int] | _Default:
        """The value of `key`, an array of integers of any width."""
        values = self._array(key, default, {int}, "an array of integers")
        return cast("list[int] | _Default", values)

    def numbers(
        self, key: str, default: _Default | _NoDefault = _REQUIRED
    ) -> list[float] | _Default:
        """The value of `key`, an array of floats or of integers, as floats."""
        values = self._array(key, default, {float, int}, "an array of numbers")
        if key not in self:
            return cast(_Default, values)
        return [float(value) for value in cast("list[float]", values)]

    def _scalar(self, key: str, default: object, types: tuple[type, ...], expected: str) -> object:
        value = self._value(key, default)
        if key in self and type(value) not in types:
            raise self._mismatch(key, value, expected)
        return value

    def _array(self, key: str, default: object, types: set[type], expected: str) -> object:
        value = self._value(key, default)
        if key in self and not (isinstance(value, list) and set(map(type, value)) <= types):
            raise self._mismatch(key, value, expected)
        return value

    def _value(self, key: str, default: object) -> object:
        if key in self:
            return self[key]
        if default is _REQUIRED:
            raise ModelFileError(f"{self._source}: missing key {_quoted(key)}")
        return default

    def _mismatch(self, key: str, value: object, expected: str) -> ModelFileError:
        found = _type_of(value)
        return ModelFileError(f"{self._source}: key {_quoted(key)} is {found}, expected {expected}")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is, and what.

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


@dataclass(frozen=True, eq=False, repr=False)
class GGUFFile:
    """An open GGUF file, or all parts of a split one. It is mapped until nothing refers to it.

    Attributes:
        path: the file that was opened.
        parts: all files of the model, in order; just `path` unless the model is split.
        version, alignment, metadata: those of the first part.
        tensors: of all parts by name, in file order.
    """

    path: Path
    parts: tuple[Path, ...]
    version: int
    alignment: int
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    _maps: tuple[mmap.mmap, ...]

    def __repr__(self) -> str:
        return f"<GGUFFile {_printable(self.path)}: {len(self.tensors)} tensors>"

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(map(len, self._maps))

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The packed rows of a tensor: a read-only view of the file.

        Returns:
            uint8 [*shape[:-1], bytes of a row].

        Raises:
            ModelFileError: there is no such tensor.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{_printable(self.path)}: missing tensor {_quoted(name)}")
        data = np.frombuffer(
            self._maps[tensor.part], np.uint8, count=tensor.n_bytes, offset=tensor.offset
        )
        return data.reshape(*tensor.shape[:-1], tensor.format.row_bytes(tensor.shape[-1]))


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a model file; any part of a split model opens all of it.

    Reads the header and maps the file; no tensor is read.

    Raises:
        ModelFileError: the file cannot be read, is malformed, or holds a tensor of a type that is
            not in `WEIGHT_FORMATS`; or a part of a split model is missing or belongs to another.
    """
    path = Path(path)
    opened = _open_part(path)
    n_parts = opened.metadata.integer("split.count", 0)
    if n_parts <= 1:
        return _join([opened], path)
    part_paths = _split_paths(opened, n_parts)
    parts = [opened if part == path else _open_part(part) for part in part_paths]
    for number, part in enumerate(parts):
        if part.metadata.integer("split.count") != n_parts:
            raise part.error(f"split.count is not {n_parts} as in {_printable(path.name)}")
        if part.metadata.integer("split.no") != number:
            raise part.error(f"split.no is not {number}, as the file's name says")
    n_tensors = sum(len(part.tensors) for part in parts)
    expected = parts[0].metadata.integer("split.tensors.count", n_tensors)
    if n_tensors != expected:
        raise parts[0].error(
            f"the parts hold {n_tensors} tensors, split.tensors.count is {expected}"
        )
    return _join(parts, path)


@dataclass(frozen=True)
class _Part:
    """One file, opened and checked; its tensors do not yet know which part they are in."""

    path: Path
    data: mmap.mmap
    version: int
    alignment: int
    metadata: Metadata
    tensors: list[TensorInfo]

    def error(self, message: str, hint: str | None = None) -> ModelFileError:
        return ModelFileError(f"{_printable(self.path)}: {message}", hint)


def _join(parts: list[_Part], path: Path) -> GGUFFile:
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        for tensor in part.tensors:
            if tensor.name in tensors:
                raise part.error(f"tensor {_quoted(tensor.name)} is in another part too")
            if number:
                tensor = replace(tensor, part=number)
            tensors[tensor.name] = tensor
    first = parts[0]
    return GGUFFile(
        path=path,
        parts=tuple(part.path for part in parts),
        version=first.version,
        alignment=first.alignment,
        metadata=first.metadata,
        tensors=tensors,
        _maps=tuple(part.data for part in parts),
    )


def _split_paths(opened: _Part, n_parts: int) -> list[Path]:
    """The files of all parts, which lie next to the one opened and must exist."""
    path = opened.path
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != n_parts:
        raise opened.error(
            f"one of {n_parts} parts of a split model, which its name does not show",
            hint=f"its name should end in -00001-of-{n_parts:05}.gguf",
        )
    names = [f"{match['prefix']}-{i:05}-of-{n_parts:05}.gguf" for i in range(1, n_parts + 1)]
    paths = [path.with_name(name) for name in names]
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        shown = ", ".join(map(_printable, missing[:3])) + (", ..." if len(missing) > 3 else "")
        raise opened.error(f"{len(missing)} of {n_parts} parts of the model are missing: {shown}")
    return paths


def _map_file(path: Path) -> mmap.mmap:
    name = _printable(path)
    try:
        # Before opening: a named pipe would block.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{name}: is a directory, not a model file")
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{name}: not a regular file")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(f"{name}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{name}: no such file") from None
    except OSError as error:
        raise ModelFileError(f"{name}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the path
        raise ModelFileError(f"{name}: cannot be read: {error}") from None


def _open_part(path: Path) -> _Part:
    data = _map_file(path)
    header = _HeaderReader(data, path)
    version = header.read_version()
    n_tensors = header.read_count("tensors", item_bytes=32, limit=_MAX_TENSORS)
    n_keys = header.read_count("keys", item_bytes=13, limit=_MAX_KEYS)
    values: dict[str, object] = {}
    for _ in range(n_keys):
        key = header.read_name("a key")
        if key in values:
            raise header.error(f"key {_quoted(key)} is there twice")
        values[key] = header.read_value(f"key {_quoted(key)}")
    metadata = Metadata(values, _printable(path))
    alignment = metadata.integer("general.alignment", _DEFAULT_ALIGNMENT)
    if alignment <= 0 or alignment & (alignment - 1):
        raise header.error(f"general.alignment is {alignment}, expected a power of two")
    tensors = [header.read_tensor() for _ in range(n_tensors)]
    data_start = -(-header.position // alignment) * alignment
    placed = _place_tensors(header, tensors, data_start, alignment)
    return _Part(path, data, version, alignment, metadata, placed)


def _place_tensors(
    header: _HeaderReader, tensors: list[TensorInfo], data_start: int, alignment: int
) -> list[TensorInfo]:
    """Turn offsets from the start of the data into offsets from the start of the file."""
    seen: set[str] = set()
    placed = []
    n_file_bytes = len(header.data)
    for tensor in tensors:
        name = _quoted(tensor.name)
        if tensor.name in seen:
            raise header.error(f"tensor {name} is there twice")
        seen.add(tensor.name)
        if tensor.offset % alignment:
            raise header.error(f"tensor {name} is at {tensor.offset}, no multiple of {alignment}")
        start = data_start + tensor.offset
        if start + tensor.n_bytes > n_file_bytes:
            raise header.error(
                f"truncated: tensor {name} ends at byte {start + tensor.n_bytes}, "
                f"the file at byte {n_file_bytes}"
            )
        placed.append(replace(tensor, offset=start))
    end, before = data_start, ""
    for tensor in sorted(placed, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise header.error(f"tensors {before} and {_quoted(tensor.name)} overlap")
        end, before = tensor.offset + tensor.n_bytes, _quoted(tensor.name)
    return placed


class _HeaderReader:
    """Reads a header from front to back, and checks each field against the bytes that are left."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.position = 0
        self._path = path
        self._end = min(len(data), _MAX_HEADER_BYTES)
        self._nested_arrays = 0

    def error(self, message: str, hint: str | None = None) -> ModelFileError:
        return ModelFileError(f"{_printable(self._path)}: {message}", hint)

    def read_version(self) -> int:
        magic = self.data[:4]
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
            raise self.error(f"truncated: {count} {what} declared, which do not fit in the file")
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
        what = f"tensor {_quoted(name)}"
        n_dims = self._u32(what)
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self.error(f"{what} has {n_dims} dimensions, expected 1 to {_MAX_DIMS}")
        shape = tuple(self._u64(what) for _ in range(n_dims))[::-1]
        ggml_type = self._u32(what)
        offset = self._u64(what)
        fmt = WEIGHT_FORMATS.get(ggml_type)
        if fmt is None:
            raise self.error(
                f"{what} is of type {_ggml_type_name(ggml_type)}, which is not supported",
                hint="types that are: " + " ".join(fmt.name for fmt in WEIGHT_FORMATS.values()),
            )
        if 0 in shape:
            raise self.error(f"{what} has an empty shape {list(shape)}")
        if shape[-1] % fmt.block_size:
            raise self.error(
                f"{what} has rows of {shape[-1]} values, "
                f"which is no multiple of {fmt.name}'s block of {fmt.block_size}"
            )
        n_bytes = math.prod(shape[:-1]) * fmt.row_bytes(shape[-1])
        return TensorInfo(name, shape, fmt, n_bytes, offset, part=0)

    def _array(self, what: str) -> _Array:
        start = self.position
        self._skip_array(what, depth=1)
        return _Array(self.data, start)

    def _skip_array(self, what: str, depth: int) -> None:
        item_type = self._u32(what)
        count = self._u64(what)
        if item_type not in _MIN_ITEM_BYTES:
            raise self.error(f"{what} is an array of an unknown type {item_type}")
        if count * _MIN_ITEM_BYTES[item_type] > self._end - self.position:
            raise self._truncated(f"{what}, an array of {count} items")
        if item_type == _STRING:
            self._skip_strings(count, what)
        elif item_type == _ARRAY:
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

    def _skip_strings(self, count: int, what: str) -> None:
        # The hot loop of opening a file: one read per string, and one check for all of them, since
        # a read that starts past the end raises.
        data, position, read_u64 = self.data, self.position, _read_u64
        try:
            for _ in range(count):
                position += read_u64(data, position)[0] + 8
        except (struct.error, OverflowError):
            raise self._truncated(what) from None
        if position > self._end:
            raise self._truncated(what)
        self.position = position

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
        return self.error(f"truncated: the file ends within {what}")


class _Array:
    """An array whose lengths have been checked, to be decoded when it is asked for."""

    def __init__(self, data: mmap.mmap, start: int) -> None:
        self._data = data
        self._start = start

    def decode(self) -> list[object]:
        return self._decode(self._start)[0]

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


def _ggml_type_name(ggml_type: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(ggml_type).name)
    except ValueError:
        return f"{ggml_type} (unknown to ggml)"


_TYPE_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


def _type_of(value: object) -> str:
    """What a value is, for a message: "a string", "an array of integers"."""
    name = _TYPE_NAMES.get(type(value), type(value).__name__)
    if isinstance(value, list) and value:
        name += f" of {_TYPE_NAMES.get(type(value[0]), 'value')}s"
    return f"{'an' if name[0] in 'aei' else 'a'} {name}"


_short = reprlib.Repr()
_short.maxstring = 100


def _quoted(name: str) -> str:
    """A name out of a file, fit for a line of output."""
    return _short.repr(name)


def _printable(path: str | os.PathLike[str]) -> str:
    """A path as the user wrote it, unless that would break the line."""
    text = os.fspath(path)
    return text if text.isprintable() else repr(text)
