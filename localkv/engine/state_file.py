"""Files of rows: tensors with digests, and what the bytes of rows mean.

A file is safetensors, with a digest of all that is in it. It is written tensor by tensor, so that
it takes no memory of its size. A saved state is mapped when it is read (`StateFile`): the library
checks that its tensors fill it without gaps, and every digest is compared before anything is used.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import prod
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array, Arrays
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import SegmentSpec, in_words
from localkv.errors import UsageError, printable, quoted
from localkv.quant_formats import with_todays_names
from localkv.system.bus_errors import watch
from localkv.system.files import written_whole

IDS, KINDS = "tokens.ids", "tokens.generated"
"""Tensors: int32 and uint8 [tokens]."""

DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
}
DIGESTS, DIGEST = "digests", "digest"
"""Keys of the metadata: of each tensor, and of all other metadata."""

MOST_HEADER = 16 << 20
"""Bytes; one of 1,000 layers takes a few."""
ALIGNMENT = 64
_DIGEST_BYTES = 16

HINT = "localkv complete --save-state FILE makes one"


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a state.

    Attributes:
        dtype: a key of `DTYPES`.
        parts: makes its values, one part after the other.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[NDArray[Any]]]

    @property
    def n_bytes(self) -> int:
        return int(prod(self.shape)) * DTYPES[self.dtype].itemsize


def write_state(
    path: str | os.PathLike[str], metadata: Mapping[str, str], tensors: Sequence[StateTensor]
) -> int:
    """Write a file, or leave what had its name as it is; returns its bytes.

    Raises:
        UsageError: it can't be written.
    """
    try:
        with written_whole(path) as file:
            write_tensors(file, metadata, tensors)
            return file.tell()
    except OSError as error:
        raise UsageError(f"{_what(path)}: cannot be written: {error.strerror or error}") from error


def write_tensors(
    file: BinaryIO, metadata: Mapping[str, str], tensors: Sequence[StateTensor]
) -> None:
    """Write metadata and tensors with their digests to an empty file, up to its end.

    Raises:
        OSError: they can't be written.
    """
    digests = {tensor.name: "0" * 2 * _DIGEST_BYTES for tensor in tensors}
    file.write(_header(metadata, digests, tensors))
    for tensor in tensors:
        digests[tensor.name] = _write(file.write, tensor)
    file.seek(0)
    file.write(_header(metadata, digests, tensors))
    file.seek(0, os.SEEK_END)


def bytes_of(metadata: Mapping[str, str], tensors: Sequence[StateTensor]) -> int:
    """Bytes of the file that `write_tensors` makes."""
    digests = {tensor.name: "0" * 2 * _DIGEST_BYTES for tensor in tensors}
    return len(_header(metadata, digests, tensors)) + sum(tensor.n_bytes for tensor in tensors)


def _write(write: Callable[[memoryview], object], tensor: StateTensor) -> str:
    """Write a tensor's bytes; returns their digest."""
    found, n_bytes = new_digest(), 0
    for part in tensor.parts():
        values = np.ascontiguousarray(part, DTYPES[tensor.dtype])
        data = values.reshape(-1).view(np.uint8).data
        found.update(data)
        write(data)
        n_bytes += len(data)
    if n_bytes != tensor.n_bytes:
        raise ValueError(f"{tensor.name} has {n_bytes} bytes, not {tensor.n_bytes}")
    return found.hexdigest()


def _header(
    metadata: Mapping[str, str], digests: Mapping[str, str], tensors: Sequence[StateTensor]
) -> bytes:
    """The safetensors header: the length of a JSON object, and the object, padded with spaces."""
    ends = list(accumulate((tensor.n_bytes for tensor in tensors), initial=0))
    every = {**metadata, DIGESTS: json.dumps(digests)}
    every[DIGEST] = metadata_digest(every)
    table: dict[str, Any] = {"__metadata__": every}
    for tensor, start, end in zip(tensors, ends[:-1], ends[1:], strict=True):
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def metadata_digest(metadata: Mapping[str, str]) -> str:
    """The digest of all metadata but itself."""
    found = new_digest()
    for key in sorted(metadata.keys() - {DIGEST}):
        for text in (key, metadata[key]):
            data = text.encode(errors="surrogatepass")
            found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


class StateFile:
    """An open file whose header is well formed and whose metadata have their digest.

    Attributes:
        metadata: without the digests.
        name: of the file, for messages.

    Raises:
        UsageError: it can't be read, or is no such file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from safetensors import SafetensorError, safe_open

        self.name = _what(path)
        self._path = path
        self._opened, self._data = self._mapped()
        n_header = int.from_bytes(self._data[:8], "little")
        if n_header > min(MOST_HEADER, len(self._data) - 8):
            raise self.refused("not a saved state, or cut short")
        try:
            opened = cast(Any, safe_open(os.fspath(path), framework="numpy"))
            found = opened.metadata() or {}
            tensors = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            facts = [(name, piece.get_dtype(), tuple(piece.get_shape())) for name, piece in tensors]
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise self.refused("not a saved state, or a damaged one") from error
        if found.get(DIGEST) != metadata_digest(found):
            raise self.refused("not a saved state, or its header is damaged")
        self.metadata = {key: found[key] for key in found.keys() - {DIGEST, DIGESTS}}
        for key in self.metadata.keys() & _NAMING_TYPES:
            self.metadata[key] = with_todays_names(self.metadata[key])
        try:
            self._digests = json.loads(found.get(DIGESTS, ""))
        except (ValueError, RecursionError) as error:
            raise self.refused("not a saved state") from error
        self._tensors = dict[str, tuple[str, tuple[int, ...], int]]()
        at = 8 + n_header
        for name, dtype, shape in facts:
            self._tensors[name] = dtype, shape, at
            at += prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else 0
        names = self._digests.keys() if isinstance(self._digests, dict) else ()
        if names != self._tensors.keys() or at != len(self._data):
            raise self.refused("not a saved state, or its header is damaged")

    def _mapped(self) -> tuple[os.stat_result, mmap.mmap]:
        try:
            if not stat.S_ISREG(os.stat(self._path).st_mode):  # a pipe would wait when it is opened
                raise self.refused("not a regular file")
            with open(self._path, "rb") as file:
                found = os.fstat(file.fileno())
                if not found.st_size:
                    raise self.refused("the file is empty")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{self.name}: {reason}", hint=HINT) from error
        watch(data, self.name)
        return found, data

    def refused(self, reason: str, hint: str | None = HINT) -> UsageError:
        """The error that says why the file can't be used."""
        return UsageError(f"{self.name}: {reason}", hint=hint)

    def check(self, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Compare types and shapes of the tensors, then their digests.

        Args:
            wanted: dtype and shape of every tensor.

        Raises:
            UsageError: there are others, or one is damaged.
        """
        if self._tensors.keys() != wanted.keys():
            name = min(self._tensors.keys() ^ wanted.keys())
            raise self.refused(f"damaged: tensor {quoted(name)} is missing or unknown")
        for name, facts in wanted.items():
            if self._tensors[name][:2] != facts:
                raise self.refused(f"damaged: tensor {name!r} has another type or shape")
        for name in wanted:
            found = new_digest()
            found.update(self.tensor(name).reshape(-1).view(np.uint8).data)
            if found.hexdigest() != self._digests[name]:
                raise self.refused(f"damaged: the checksum of {name!r} is another")

    def tensor(self, name: str) -> NDArray[Any]:
        """The values of a tensor: a view of the mapped file."""
        dtype, shape, at = self._tensors[name]
        return np.frombuffer(self._data, DTYPES[dtype], prod(shape), at).reshape(shape)

    def is_unchanged(self) -> bool:
        """Whether nobody has written to the file; another one under its name does no harm."""
        try:
            now = os.stat(self._path)
        except OSError:
            return True
        was = self._opened
        if (now.st_dev, now.st_ino) != (was.st_dev, was.st_ino):
            return True
        return (now.st_size, now.st_mtime_ns) == (was.st_size, was.st_mtime_ns)


_NAMING_TYPES = {"layers", "types", "choices"}
"""The metadata that have names of cache types in them."""


def in_parts(values: NDArray[Any]) -> Callable[[], Iterator[NDArray[Any]]]:
    """What `StateTensor.parts` makes of an array."""
    return lambda: iter((values,))


def _what(path: str | os.PathLike[str]) -> str:
    return f"the state {printable(path)}"


def adapters_of(cache: KVCache, scales: Sequence[float]) -> str:
    """The adapters that rows were made with, and their scales, as JSON; empty for none."""
    pairs = zip(cache.adapters, scales, strict=bool(scales))
    found = sorted([name, scale] for name, scale in pairs if scale)
    return json.dumps(found) if found else ""


def cache_identity(cache: KVCache) -> dict[str, str]:
    """What bytes of rows mean: segments and types by layer, scales and codebooks."""
    segments_of = {i: layout.segments for layout in cache.layouts for i in layout.group.layers}
    specs = [list(segments_of.get(i, ())) for i in range(len(cache.layers))]
    segments = [
        (cache.arrays_of(i), segment)
        for i, layer in enumerate(cache.layers)
        for segment in layer.segments
    ]
    return {
        "layers": json.dumps([[asdict(spec) for spec in of_layer] for of_layer in specs]),
        "types": in_words([_pair(of_layer) for of_layer in specs]),
        "scales": _digest((at, x) for at, part in segments for x in (part.scale_k, part.scale_v)),
        "codebooks": _digest(
            (at, x) for at, part in segments for x in (part.codebook_k, part.codebook_v)
        ),
    }


def _pair(specs: list[SegmentSpec]) -> tuple[str, str] | None:
    """The types of a layer's packed rows."""
    packed = [spec for spec in specs if not spec.is_tail]
    return (packed[-1].type_k, packed[-1].type_v) if packed else None


def _digest(tables: Iterable[tuple[Arrays, Array | None]]) -> str:
    """The digest of arrays; None stands for a missing one. Empty if all are missing."""
    found = [None if x is None else at.to_numpy(x).tobytes() for at, x in tables]
    if not any(found):
        return ""
    return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()
