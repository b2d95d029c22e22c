"""A tensor in one of the number formats: its packed bytes, its shape, and how to read a part of it.

Weights are held like this from the file to the kernel: the bytes are a view of the mapped file and
are never decoded as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.formats.base import TILE_VALUES, Array, QuantFormat, split_blocks


@dataclass(frozen=True)
class PackedTensor:
    """A packed tensor of logical shape `shape` (row-major: the last axis runs along a row).

    Attributes:
        format: how a row is packed.
        rows: uint8 [..., bytes of a row], the leading axes are those of `shape`: an array of
            NumPy's or of the backend's.
        shape: logical shape, e.g. [n_out, n_in] or [n_experts, n_out, n_in].
        halves_activations: activations are rounded to f16 before they meet it, as ggml does for
            F16 weights (`vec_dot_type` in ggml-cpu.c).
    """

    format: QuantFormat
    rows: Array
    shape: tuple[int, ...]
    halves_activations: bool = False

    @property
    def reads_rows(self) -> bool:
        """Products read `rows`; false for a kind that a backend has laid out anew."""
        return True

    @property
    def operands(self) -> tuple[Any, ...]:
        """The arrays that products read."""
        return (self.rows,)

    @property
    def n_bytes(self) -> int:
        n_bytes: int = self.rows.nbytes
        return n_bytes

    def __getitem__(self, index: int | slice | Array) -> PackedTensor:
        """Index the leading axis, still packed; a single row has none."""
        if len(self.shape) == 1:
            raise TypeError("a packed row cannot be indexed")
        rows = self.rows[index]
        shape = (*rows.shape[:-1], self.shape[-1])
        return PackedTensor(self.format, rows, shape, self.halves_activations)

    def decode(self) -> NDArray[np.float32]:
        """All values, [*shape], of rows in the host's memory; for small tensors and tiles.

        They may be a view of the mapped file, so they must not be written to.
        """
        return self.format.codec.decode(split_blocks(self.format, np.asarray(self.rows)))

    def row_tiles(self) -> Iterator[tuple[slice, PackedTensor]]:
        """Pieces of the leading axis that hold at most `TILE_VALUES` values (at least one row)."""
        n_rows = self.shape[0]
        step = max(1, TILE_VALUES // math.prod(self.shape[1:]))
        for start in range(0, n_rows, step):
            tile = slice(start, min(start + step, n_rows))
            yield tile, self[tile]
