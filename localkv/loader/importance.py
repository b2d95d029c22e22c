"""Importance matrices: how much the errors of each column of a matrix count.

A column's importance is the mean square of the activations that meet it, measured by
llama-imatrix. Their file is GGUF: for each matrix the sums of squares
(`NAME.in_sum2`, one row for each expert), and how many activations there were (`NAME.counts`).
llama.cpp's former format (`.dat`) is read, too.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localkv.errors import ModelFileError, UsageError, printable, quoted
from localkv.loader.gguf_file import map_file, open_gguf

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNK_COUNT, CHUNK_SIZE = (
    "imatrix.datasets",
    "imatrix.chunk_count",
    "imatrix.chunk_size",
)
_MOST_NAME_BYTES = 1 << 16

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


def read_importance(path: str) -> Importance:
    """Read an importance matrix.

    Raises:
        ModelFileError: the file can't be read, or is none.
        UsageError: it is a model.
    """
    file = map_file(Path(path))
    found = _read_gguf(path) if file.data[:4] == b"GGUF" else _read_legacy(path, file.data[:])
    for name, values in found.columns.items():
        if not np.isfinite(values).all():
            raise ModelFileError(
                f"{printable(path)}: {quoted(name)} has values that are not finite"
            )
    return found


def _read_gguf(path: str) -> Importance:
    gguf = open_gguf(path)
    names = [name.removesuffix(SUMS) for name in gguf.tensors if name.endswith(SUMS)]
    if not names or CHUNK_COUNT not in gguf.metadata:
        raise UsageError(
            f"{printable(path)}: not an importance matrix", hint="llama-imatrix measures one"
        )
    columns = {}
    for name in names:
        if name + COUNTS not in gguf.tensors:
            raise ModelFileError(f"{printable(path)}: {quoted(name)} has sums, but no counts")
        infos = [gguf.tensors[name + end] for end in (SUMS, COUNTS)]
        if any(info.format.name != "f32" for info in infos):
            raise ModelFileError(f"{printable(path)}: {quoted(name)} is not of type F32")
        sums = gguf.data(name + SUMS).view(np.float32).reshape(-1)
        counts = np.rint(gguf.data(name + COUNTS).view(np.float32).reshape(-1))
        if sums.size % counts.size:
            raise ModelFileError(
                f"{printable(path)}: {quoted(name)} has {sums.size} sums and {counts.size} counts"
            )
        by_expert = sums.reshape(counts.size, -1)
        count = counts.astype(np.float32)[:, None]
        with np.errstate(all="ignore"):
            means = np.where(count > 0, by_expert / count, np.float32(1))
        columns[name] = means.astype(np.float32).reshape(-1)
    return Importance(
        path, gguf.metadata.strings(DATASETS, []), gguf.metadata.integer(CHUNK_COUNT), columns
    )


class _Bytes:
    """A file of the former format, read from front to back."""

    def __init__(self, data: bytes, path: str) -> None:
        self.data, self.path, self.position = data, path, 0

    def take(self, n: int) -> bytes:
        if not 0 <= n <= len(self.data) - self.position:
            raise ModelFileError(
                f"{printable(self.path)}: not an importance matrix, or cut off",
                hint="llama-imatrix measures one",
            )
        start, self.position = self.position, self.position + n
        return self.data[start : self.position]

    def i32(self) -> int:
        return int(struct.unpack("<i", self.take(4))[0])


def _read_legacy(path: str, data: bytes) -> Importance:
    file, columns = _Bytes(data, path), dict[str, Floats]()
    n_entries = file.i32()
    file.take(-1 if not 1 <= n_entries <= len(data) else 0)
    for _ in range(n_entries):
        n_bytes = file.i32()
        name = file.take(n_bytes if n_bytes <= _MOST_NAME_BYTES else -1).decode("utf-8", "replace")
        n_calls, n_values = file.i32(), file.i32()
        file.take(-1 if n_values < 1 else 0)
        values = np.frombuffer(file.take(4 * n_values), np.float32)
        columns[name] = values / np.float32(n_calls) if n_calls > 0 else values
    n_chunks, datasets = 0, list[str]()
    if file.position < len(data):
        n_chunks = file.i32()
        if file.position < len(data):
            datasets.append(file.take(file.i32()).decode("utf-8", "replace"))
    return Importance(path, datasets, max(0, n_chunks), columns)
