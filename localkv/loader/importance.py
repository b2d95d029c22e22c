"""Importance matrices: how much the errors of each column of a matrix count.

A column's importance is the mean square of the activations that meet it (`quality/activations.py`
measures them). The file is llama-imatrix's, in GGUF: for each matrix the sums of squares
(`NAME.in_sum2`, one row for each expert), and how many activations there were (`NAME.counts`).
llama.cpp's former format (`.dat`) is read, too.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localkv.errors import ModelFileError, UsageError, printable, quoted
from localkv.loader.gguf_copy import NewFile, NewTensor, text, texts, u32
from localkv.loader.gguf_file import map_file, open_gguf
from localkv.quant_formats import FORMATS
from localkv.system.files import written_whole

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNK_COUNT, CHUNK_SIZE = (
    "imatrix.datasets",
    "imatrix.chunk_count",
    "imatrix.chunk_size",
)
_MOST_NAME_BYTES, _MOST_COUNT = 1 << 16, 1 << 53

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Importance:
    """An importance matrix.

    Attributes:
        path: its file, as the user wrote it.
        datasets: what texts it was measured with.
        n_chunks: how many pieces of them; 0 if unknown.
        columns: by the name of a matrix: float32 [experts * n_in], of one expert or of each.
    """

    path: str
    datasets: Sequence[str]
    n_chunks: int
    columns: Mapping[str, Floats]

    def of(self, name: str, shape: tuple[int, ...]) -> Floats | None:
        """The importance of a matrix's columns: float32 [experts, n_in]; None if there is none.

        Raises:
            ModelFileError: it is for a matrix of another shape.
        """
        values = self.columns.get(name)
        if values is None:
            return None
        n_experts = shape[-3] if len(shape) > 2 else 1
        if values.size != n_experts * shape[-1]:
            if name in ("token_embd.weight", "per_layer_token_embd.weight"):
                return None
            raise ModelFileError(
                f"{printable(self.path)}: {values.size} values for tensor {quoted(name)}, "
                f"which has {n_experts} x {shape[-1]} columns",
                hint="take an importance matrix of the same model",
            )
        return values.reshape(n_experts, shape[-1])

    def only(self, included: Sequence[str], excluded: Sequence[str]) -> Importance:
        """The importance of matrices whose names contain one of `included` and none of `excluded`.

        Without `included` all names count.
        """
        kept = {
            name: values
            for name, values in self.columns.items()
            if (not included or any(part in name for part in included))
            and not any(part in name for part in excluded)
        }
        return replace(self, columns=kept)


@dataclass(frozen=True)
class Sums:
    """What was measured of a matrix, or of a stack of them.

    Attributes:
        squares: float32 [matrices * n_in], sums of the squares of the activations.
        counts: int64 [matrices], how many activations there were; one number if all matrices of a
            stack met as many.
    """

    squares: Floats
    counts: NDArray[np.int64]

    @property
    def by_matrix(self) -> Floats:
        """float32 [counts, values]: the squares, as the counts divide them."""
        return self.squares.reshape(len(self.counts), -1)

    @property
    def means(self) -> Floats:
        """The mean squares: float32, as `squares`. They are 1 for a matrix that met nothing."""
        count = self.counts.astype(np.float32)[:, None]
        with np.errstate(all="ignore"):
            means = np.where(count > 0, self.by_matrix / count, np.float32(1))
        return means.astype(np.float32).reshape(-1)


@dataclass(frozen=True)
class Measured:
    """What a file has.

    Attributes:
        sums: by the names of matrices.
        datasets: what texts it was measured with.
        n_chunks: how many pieces of them; 0 if unknown.
        chunk_size: tokens of a piece; 0 in the former format, whose sums and counts are of means of
            pieces.
    """

    sums: Mapping[str, Sums]
    datasets: Sequence[str] = ()
    n_chunks: int = 0
    chunk_size: int = 0

    def of_tokens(self, chunk_size: int) -> Measured:
        """By tokens what is by pieces, if these had as many tokens as is given."""
        if self.chunk_size or not self.sums:
            return self
        sums = {
            name: Sums(one.squares * np.float32(chunk_size), one.counts * chunk_size)
            for name, one in self.sums.items()
        }
        return replace(self, sums=sums, chunk_size=chunk_size)

    def joined(self, other: Measured) -> Measured:
        """Both together, by tokens of the first one's pieces.

        Raises:
            UsageError: they are of different models.
        """
        sums = dict(self.sums)
        for name, more in other.of_tokens(self.chunk_size).sums.items():
            own = sums.get(name)
            sums[name] = more if own is None else _added(name, own, more)
        most = max((int(one.counts.max()) for one in sums.values()), default=0)
        n_chunks = most // self.chunk_size if self.chunk_size else 0
        return Measured(sums, [*self.datasets, *other.datasets], n_chunks, self.chunk_size)


def _added(name: str, a: Sums, b: Sums) -> Sums:
    n_matrices = max(len(a.counts), len(b.counts))
    if a.squares.size != b.squares.size or {len(a.counts), len(b.counts)} - {1, n_matrices}:
        raise UsageError(
            f"{quoted(name)} has {a.squares.size} values in one importance matrix and "
            f"{b.squares.size} in another",
            hint="combine files of one model",
        )
    return Sums(a.squares + b.squares, np.broadcast_to(a.counts, n_matrices) + b.counts)


def read_importance(path: str) -> Importance:
    """Read an importance matrix.

    Raises:
        ModelFileError: the file can't be read, or is none.
        UsageError: it is a model.
    """
    found = read_measured(path)
    columns = {name: sums.means for name, sums in found.sums.items()}
    return Importance(path, found.datasets, found.n_chunks, columns)


def read_measured(path: str) -> Measured:
    """Read what was measured for an importance matrix.

    Raises:
        ModelFileError: the file can't be read, or is none.
        UsageError: it is a model.
    """
    file = map_file(Path(path))
    found = _read_gguf(path) if file.data[:4] == b"GGUF" else _read_legacy(path, file.data[:])
    for name, sums in found.sums.items():
        if not np.isfinite(sums.squares).all():
            raise ModelFileError(
                f"{printable(path)}: {quoted(name)} has values that are not finite"
            )
    return found


class Statistics(NamedTuple):
    """What llama-imatrix prints of a matrix, over the mean squares of its columns.

    Attributes:
        layer: its number, or None.
        tensor: its name without the layer's.
        total, least, most, mean, deviation: of the mean squares.
        active: share of columns above 1e-5.
        n: columns, of all experts that met activations.
        entropy: of the mean squares as probabilities, in bits.
        above: share of columns more than a standard deviation above the mean.
        cosine: how alike the sums are to the layer before; None if there is none.
    """

    layer: int | None
    tensor: str
    total: float
    least: float
    most: float
    mean: float
    deviation: float
    active: float
    n: int
    entropy: float
    above: float
    cosine: float | None


_ACTIVE = 1e-5
_LAYER = re.compile(r"blk\.(\d+)\.")


def statistics(sums: Mapping[str, Sums]) -> list[Statistics]:
    """Statistics of all matrices that met activations, by tensors and then from the largest on."""
    found = [_statistics(name, sums) for name, one in sums.items() if one.counts.any()]
    return sorted(found, key=lambda one: (one.tensor, -one.total))


def _statistics(name: str, sums: Mapping[str, Sums]) -> Statistics:
    own, layer = sums[name], _LAYER.match(name)
    met = own.counts > 0
    means = (own.by_matrix[met] / own.counts[met, None]).astype(np.float64).reshape(-1)
    total = means.sum()
    shares = means[means > 0] / total
    deviation = math.sqrt(max(0.0, np.square(means).mean() - means.mean() ** 2))
    above = (means > means.mean() + deviation).mean() if deviation else 0.0
    cosine = None
    if layer is not None:
        before = sums.get(f"blk.{int(layer[1]) - 1}.{name[layer.end() :]}")
        if before is not None and before.squares.size == own.squares.size:
            cosine = _cosine(own.squares, before.squares)
    tensor = name[layer.end() :] if layer is not None else name
    return Statistics(
        None if layer is None else int(layer[1]),
        tensor.removesuffix(".weight"),
        float(total),
        float(means.min()),
        float(means.max()),
        float(means.mean()),
        deviation,
        float((means > _ACTIVE).mean()),
        means.size,
        float(-(shares * np.log2(shares)).sum()),
        float(above),
        cosine,
    )


def _cosine(a: Floats, b: Floats) -> float | None:
    a, b = a.astype(np.float64), b.astype(np.float64)
    sizes = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return float(a @ b) / sizes if sizes else None


def write_measured(path: Path, found: Measured) -> None:
    """Write llama-imatrix's file.

    Raises:
        OSError: it can't be written.
    """
    keys = {
        "general.type": text("imatrix"),
        DATASETS: texts(found.datasets),
        CHUNK_COUNT: u32(found.n_chunks),
        CHUNK_SIZE: u32(found.chunk_size),
    }
    fmt, tensors, data = FORMATS["f32"], list[NewTensor](), list[Floats]()
    for name in sorted(found.sums):
        sums = found.sums[name]
        n_matrices = len(sums.counts)
        for end, values in (
            (SUMS, sums.by_matrix),
            (COUNTS, sums.counts.astype(np.float32).reshape(-1, 1)),
        ):
            shape = values.shape if n_matrices > 1 else values.shape[1:]
            tensors.append(NewTensor(name + end, shape, fmt))
            data.append(np.ascontiguousarray(values))
    file = NewFile(keys, tensors)
    with written_whole(path) as out:
        out.write(file.header())
        for tensor, values in zip(tensors, data, strict=True):
            out.write(values.tobytes())
            file.pad(out, tensor)


def _read_gguf(path: str) -> Measured:
    gguf = open_gguf(path)
    names = [name.removesuffix(SUMS) for name in gguf.tensors if name.endswith(SUMS)]
    if not names or CHUNK_COUNT not in gguf.metadata:
        raise UsageError(
            f"{printable(path)}: not an importance matrix", hint="localkv imatrix measures one"
        )
    found = {}
    for name in names:
        if name + COUNTS not in gguf.tensors:
            raise ModelFileError(f"{printable(path)}: {quoted(name)} has sums, but no counts")
        infos = [gguf.tensors[name + end] for end in (SUMS, COUNTS)]
        if any(info.format.name != "f32" for info in infos):
            raise ModelFileError(f"{printable(path)}: {quoted(name)} is not of type F32")
        squares = gguf.data(name + SUMS).view(np.float32).reshape(-1)
        counts = np.rint(gguf.data(name + COUNTS).view(np.float32).reshape(-1))
        if squares.size % counts.size:
            raise ModelFileError(
                f"{printable(path)}: {quoted(name)} has {squares.size} sums and "
                f"{counts.size} counts"
            )
        if not (np.abs(counts) <= _MOST_COUNT).all():
            raise ModelFileError(f"{printable(path)}: {quoted(name)} has counts out of range")
        found[name] = Sums(squares, counts.astype(np.int64))
    keys = gguf.metadata
    datasets, n_chunks = keys.strings(DATASETS, []), keys.integer(CHUNK_COUNT)
    return Measured(found, datasets, n_chunks, max(1, keys.integer(CHUNK_SIZE, 1)))


class _Bytes:
    """A file of the former format, read from front to back."""

    def __init__(self, data: bytes, path: str) -> None:
        self.data, self.path, self.position = data, path, 0

    def take(self, n: int) -> bytes:
        if not 0 <= n <= len(self.data) - self.position:
            raise ModelFileError(
                f"{printable(self.path)}: not an importance matrix, or cut off",
                hint="localkv imatrix measures one",
            )
        start, self.position = self.position, self.position + n
        return self.data[start : self.position]

    def i32(self) -> int:
        return int(struct.unpack("<i", self.take(4))[0])


def _read_legacy(path: str, data: bytes) -> Measured:
    file, found = _Bytes(data, path), dict[str, Sums]()
    n_entries = file.i32()
    file.take(-1 if not 1 <= n_entries <= len(data) else 0)
    for _ in range(n_entries):
        n_bytes = file.i32()
        name = file.take(n_bytes if n_bytes <= _MOST_NAME_BYTES else -1).decode("utf-8", "replace")
        n_calls, n_values = file.i32(), file.i32()
        file.take(-1 if n_values < 1 else 0)
        values = np.frombuffer(file.take(4 * n_values), np.float32)
        found[name] = Sums(values, np.array([n_calls]))
    n_chunks, datasets = 0, list[str]()
    if file.position < len(data):
        n_chunks = file.i32()
        if file.position < len(data):
            datasets.append(file.take(file.i32()).decode("utf-8", "replace"))
    return Measured(found, datasets, max(0, n_chunks))
