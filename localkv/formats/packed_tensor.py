"""A tensor in one of the number formats: its packed bytes, its shape, and how to read a part of it.

Weights are held like this from the file to the kernel: the bytes are a view of the mapped file and
are never decoded as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from localkv.formats.base import TILE_VALUES, QuantFormat, split_blocks


@dataclass(frozen=True)
class PackedTensor:
    """A packed tensor of logical shape `shape` (row-major: the last axis runs along a row).

    Attributes:
        format: how a row is packed.
        rows: uint8 [..., bytes of a row], the leading axes are those of `shape`.
        shape: logical shape, e.g. [n_out, n_in] or [n_experts, n_out, n_in].
        halves_activations: activations are rounded to f16 before they meet it, as ggml does for
            F16 weights (`vec_dot_type` in ggml-cpu.c).
    """

    format: QuantFormat
    rows: Tensor
    shape: tuple[int, ...]
    halves_activations: bool = False

    @property
    def reads_rows(self) -> bool:
        """Products read `rows`; false for a kind that a backend has laid out anew."""
        return True

    @property
    def n_bytes(self) -> int:
        return self.rows.numel()

    def __getitem__(self, index: int | slice | Tensor) -> PackedTensor:
        """Index the leading axis, still packed; a single row has none."""
        if len(self.shape) == 1:
            raise TypeError("a packed row cannot be indexed")
        rows = self.rows[index]
        shape = (*rows.shape[:-1], self.shape[-1])
        return PackedTensor(self.format, rows, shape, self.halves_activations)

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All values, as `dtype` [*shape]; for small tensors and tiles of large ones.

        They may be a view of the mapped file, so they must not be written to.
        """
        planes = split_blocks(self.format, self.rows)
        return self.format.codec.decode(planes).to(dtype)

    def row_tiles(self) -> Iterator[tuple[slice, PackedTensor]]:
        """Pieces of the leading axis that hold at most `TILE_VALUES` values (at least one row)."""
        n_rows = self.shape[0]
        step = max(1, TILE_VALUES // math.prod(self.shape[1:]))
        for start in range(0, n_rows, step):
            tile = slice(start, min(start + step, n_rows))
            yield tile, self[tile]
