"""Opens a GGUF file: its metadata, and its tensors as packed bytes of the mapped file.

A mapped file must stay as it is for as long as it is used; `MappedFile` checks that. Where a file
is not to be mapped, `FileCopies` holds the tensors that were read. This file knows the container
(versions 2 and 3, little endian, split files) and nothing about what the keys mean, how a model is
built from the tensors, or how their bytes decode. It is free of torch.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localkv.errors import ModelFileError, printable, quoted
from localkv.loader.gguf_header import (
    MAX_KEYS,
    MAX_TENSORS,
    HeaderReader,
    IncompleteFileError,
    TensorInfo,
)
from localkv.loader.metadata import Metadata
from localkv.loader.split_name import part_names, split_name
from localkv.system.bus_errors import watch


@dataclass(frozen=True, eq=False)
class MappedFile:
    """The bytes of a file that was opened.

    Attributes:
        path: where it was found.
        data: its bytes.
        device, inode: which file it was.
        modified: when it had been written to last, in nanoseconds.
    """

    path: Path
    data: mmap.mmap
    device: int
    inode: int
    modified: int

    def check_unchanged(self) -> None:
        """Refuse a file that was shortened or written to since it was opened.

        Another file that took its place under the same name, or that it was removed, does no harm:
        the mapping keeps the opened file.

        Raises:
            ModelFileError: it was.
        """
        changed = self.data.size() != len(self.data)
        if not changed:
            try:
                now = os.stat(self.path)
            except OSError:
                return
            same = (now.st_dev, now.st_ino) == (self.device, self.inode)
            changed = same and now.st_mtime_ns != self.modified
        if changed:
            raise self._changed()

    def check_is_same(self, now: os.stat_result) -> None:
        """Refuse to read from a file that is not the one that was opened, as it was then.

        Raises:
            ModelFileError: it is another, or was written to.
        """
        found = (now.st_dev, now.st_ino, now.st_mtime_ns, now.st_size)
        if found != (self.device, self.inode, self.modified, len(self.data)):
            raise self._changed()

    def _changed(self) -> ModelFileError:
        return ModelFileError(
            f"{printable(self.path)}: the file was changed while it was in use",
            hint="start again; a new file that is renamed to the old name does no harm",
        )


def map_file(path: Path) -> MappedFile:
    """Open a file and map all of it.

    Raises:
        ModelFileError: it can't be read, is empty, or is no regular file.
    """
    name = printable(path)
    try:
        # Before opening: a named pipe would block.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{name}: is a directory, not a model file")
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{name}: not a regular file")
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            if info.st_size == 0:
                raise IncompleteFileError(f"{name}: the file is empty")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{name}: no such file") from None
    except OSError as error:
        raise ModelFileError(f"{name}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the path
        raise ModelFileError(f"{name}: cannot be read: {error}") from None
    watch(data, name)
    return MappedFile(path, data, info.st_dev, info.st_ino, info.st_mtime_ns)


@dataclass
class FileCopies:
    """The tensors that were read, each in memory of its own, whose pages can be given back."""

    _memory: dict[str, mmap.mmap] = field(default_factory=dict)

    def read(self, file: MappedFile, tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor: uint8 [n].

        Raises:
            ModelFileError: they can't be read, or the file is no longer the one that was opened.
        """
        if hasattr(mmap, "MAP_PRIVATE"):
            # pages of shared memory would stay when they are given back
            memory = mmap.mmap(-1, tensor.n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = mmap.mmap(-1, tensor.n_bytes)
        self._memory[tensor.name] = memory
        try:
            with open(file.path, "rb", buffering=0) as source:
                file.check_is_same(os.fstat(source.fileno()))
                source.seek(tensor.offset)
                _fill(memory, source)
        except OSError as error:
            name = printable(file.path)
            raise ModelFileError(f"{name}: cannot be read: {error.strerror or error}") from None
        return np.frombuffer(memory, np.uint8)

    def release(self, name: str) -> None:
        """Give back the memory of a tensor that was laid out again; views of it read as zeros."""
        memory = self._memory.pop(name, None)
        if memory is not None and hasattr(mmap, "MADV_DONTNEED"):
            memory.madvise(mmap.MADV_DONTNEED)


def _fill(memory: mmap.mmap, source: io.FileIO) -> None:
    with memoryview(memory) as whole:
        done = 0
        while done < len(whole):
            n = source.readinto(whole[done:])
            if not n:
                raise OSError("it ended early")
            done += n


_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, eq=False, repr=False)
class GGUFFile:
    """An open GGUF file, or all parts of a split one. It is mapped until nothing refers to it.

    Attributes:
        path: the file that was opened.
        parts: all files of the model, in order; just `path` unless the model is split.
        version, alignment, metadata: the first part's.
        tensors: of all parts by name, in file order.
        copies: those that were read, where tensors are read into memory; None if they are mapped.
    """

    path: Path
    parts: tuple[Path, ...]
    version: int
    alignment: int
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    _files: tuple[MappedFile, ...]
    copies: FileCopies | None = None

    def __repr__(self) -> str:
        return f"<GGUFFile {printable(self.path)}: {len(self.tensors)} tensors>"

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(len(file.data) for file in self._files)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The packed rows of a tensor: a view of the file, not to be written to, or a copy.

        Returns:
            uint8 [*shape[:-1], bytes of a row].

        Raises:
            ModelFileError: there is no such tensor, or it can't be read.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{printable(self.path)}: missing tensor {quoted(name)}")
        file = self._files[tensor.part]
        if self.copies is not None and tensor.n_bytes:
            data = self.copies.read(file, tensor)
        else:
            data = np.frombuffer(file.data, np.uint8, tensor.n_bytes, tensor.offset)
        return data.reshape(*tensor.shape[:-1], tensor.format.row_bytes(tensor.shape[-1]))

    def check_unchanged(self) -> None:
        """Refuse a file that was shortened or written to since it was opened.

        What was read into memory stays as it is.

        Raises:
            ModelFileError: one was, or a part of it.
        """
        for file in self._files if self.copies is None else ():
            file.check_unchanged()

    def release(self, name: str) -> None:
        """Give back the memory of a tensor's pages.

        Views stay valid and read the file again; views of a copy read as zeros.
        """
        if self.copies is not None:
            self.copies.release(name)
            return
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        tensor = self.tensors[name]
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.offset + tensor.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._files[tensor.part].data.madvise(mmap.MADV_DONTNEED, start, end - start)


def open_gguf(path: str | os.PathLike[str], *, use_mmap: bool = True) -> GGUFFile:
    """Open a model file; any part of a split model opens all of it.

    Reads the header and maps the file; no tensor is read.

    Args:
        use_mmap: tensors are views of the mapped file; else each is read when it is asked for.

    Raises:
        ModelFileError: the file cannot be read, is malformed, or holds a tensor of a type that is
            not in `WEIGHT_FORMATS`. A split model also raises it if a part is missing or belongs to
            another model.
    """
    gguf = _open_parts(Path(path))
    return gguf if use_mmap else replace(gguf, copies=FileCopies())


def _open_parts(path: Path) -> GGUFFile:
    opened = _open_part(path)
    n_parts = opened.metadata.integer("split.count", 0)
    if n_parts <= 1:
        return _join([opened], path)
    part_paths = _split_paths(opened, n_parts)
    parts = [opened if part == path else _open_part(part) for part in part_paths]
    for number, part in enumerate(parts):
        if part.metadata.integer("split.count") != n_parts:
            raise part.error(f"split.count is not {n_parts} as in {printable(path.name)}")
        if part.metadata.integer("split.no") != number:
            raise part.error(f"split.no is not {number}, as the file's name says")
    n_tensors = sum(len(part.tensors) for part in parts)
    expected = parts[0].metadata.integer("split.tensors.count", n_tensors)
    if n_tensors != expected:
        raise parts[0].error(f"split.tensors.count is {expected}, the parts hold {n_tensors}")
    return _join(parts, path)


@dataclass(frozen=True)
class PartHeader:
    """The header of one file, checked; its tensors do not yet know which part they are in."""

    path: Path
    version: int
    alignment: int
    metadata: Metadata
    tensors: list[TensorInfo]

    def error(self, message: str, hint: str | None = None) -> ModelFileError:
        return ModelFileError(f"{printable(self.path)}: {message}", hint)


@dataclass(frozen=True)
class _Part(PartHeader):
    """The error, with the file's name."""

    file: MappedFile


def _join(parts: list[_Part], path: Path) -> GGUFFile:
    first = parts[0]
    return GGUFFile(
        path=path,
        parts=tuple(part.path for part in parts),
        version=first.version,
        alignment=first.alignment,
        metadata=first.metadata,
        tensors=join_tensors(parts),
        _files=tuple(part.file for part in parts),
    )


def join_tensors(parts: Sequence[PartHeader]) -> dict[str, TensorInfo]:
    """The tensors of all parts by name, in order.

    Raises:
        ModelFileError: two parts have the same.
    """
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        for tensor in part.tensors:
            if tensor.name in tensors:
                raise part.error(f"tensor {quoted(tensor.name)} is in another part too")
            if number:
                tensor = replace(tensor, part=number)
            tensors[tensor.name] = tensor
    return tensors


def _split_paths(opened: _Part, n_parts: int) -> list[Path]:
    """The files of all parts, which lie next to the one opened and must exist."""
    path = opened.path
    named = split_name(path.name)
    if named is None or named[2] != n_parts:
        raise opened.error(
            f"one of {n_parts} parts of a split model, which its name does not show",
            hint=f"its name should end in -00001-of-{n_parts:05}.gguf",
        )
    paths = [path.with_name(name) for name in part_names(named[0], n_parts)]
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        shown = ", ".join(map(printable, missing[:3])) + (", ..." if len(missing) > 3 else "")
        raise opened.error(f"{len(missing)} of {n_parts} parts of the model are missing: {shown}")
    return paths


def read_metadata(path: str | os.PathLike[str]) -> Metadata:
    """The keys and values of one file alone, without regard to its tensors and its other parts.

    Raises:
        ModelFileError: the file is missing, or its keys are malformed.
    """
    path = Path(path)
    with _mending(path):
        header = HeaderReader(map_file(path).data, path)
        return _read_keys(header, path)[2]


def _read_keys(header: HeaderReader, path: Path) -> tuple[int, int, Metadata]:
    """The version, the number of tensors, and all keys; the tensor table comes next."""
    version = header.read_version()
    n_tensors = header.read_count("tensors", item_bytes=32, limit=MAX_TENSORS)
    n_keys = header.read_count("keys", item_bytes=13, limit=MAX_KEYS)
    values: dict[str, object] = {}
    for _ in range(n_keys):
        key = header.read_name("a key")
        if key in values:
            raise header.error(f"key {quoted(key)} is there twice")
        values[key] = header.read_value(f"key {quoted(key)}")
    return version, n_tensors, Metadata(values, printable(path))


@contextmanager
def _mending(path: Path) -> Iterator[None]:
    """The hint for a file that ends too early: how to get the whole file."""
    try:
        yield
    except IncompleteFileError as error:
        from localkv.loader.hub.cache import cached_name

        name = cached_name(path)
        hint = f"localkv pull {name} fetches it again" if name else "download it again"
        raise type(error)(error.message, hint) from None


def _open_part(path: Path) -> _Part:
    with _mending(path):
        file = map_file(path)
        header = read_header(file.data, path, len(file.data))
    return _Part(path, header.version, header.alignment, header.metadata, header.tensors, file)


def read_header(data: mmap.mmap | bytes, path: Path, file_bytes: int) -> PartHeader:
    """The header of a file of `file_bytes` that begins with `data`.

    Raises:
        TruncatedError: `data` ends before the header does.
        ModelFileError: it is malformed, or has a tensor of a type that is not supported.
    """
    header = HeaderReader(data, path)
    version, n_tensors, metadata = _read_keys(header, path)
    alignment = metadata.integer("general.alignment", _DEFAULT_ALIGNMENT)
    if alignment <= 0 or alignment & (alignment - 1):
        raise header.error(f"general.alignment is {alignment}, expected a power of two")
    tensors = [header.read_tensor() for _ in range(n_tensors)]
    data_start = -(-header.position // alignment) * alignment
    placed = _place_tensors(header, tensors, data_start, alignment, file_bytes)
    return PartHeader(path, version, alignment, metadata, placed)


def _place_tensors(
    header: HeaderReader,
    tensors: list[TensorInfo],
    data_start: int,
    alignment: int,
    n_file_bytes: int,
) -> list[TensorInfo]:
    """Turn offsets from the start of the data into offsets from the start of the file."""
    seen: set[str] = set()
    placed = []
    for tensor in tensors:
        name = quoted(tensor.name)
        if tensor.name in seen:
            raise header.error(f"tensor {name} is there twice")
        seen.add(tensor.name)
        if tensor.offset % alignment:
            raise header.error(
                f"tensor {name} is at {tensor.offset}, not a multiple of {alignment}"
            )
        start = data_start + tensor.offset
        if start + tensor.n_bytes > n_file_bytes:
            message = (
                f"truncated: tensor {name} ends at byte {start + tensor.n_bytes}, "
                f"the file at byte {n_file_bytes}"
            )
            raise IncompleteFileError(header.error(message).message)
        placed.append(replace(tensor, offset=start))
    end, before = data_start, ""
    for tensor in sorted(placed, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise header.error(f"tensors {before} and {quoted(tensor.name)} overlap")
        end, before = tensor.offset + tensor.n_bytes, quoted(tensor.name)
    return placed
