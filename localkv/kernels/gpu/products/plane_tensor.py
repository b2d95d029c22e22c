"""Packed matrices in a GPU's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localkv.errors import ModelFileError
from localkv.kernels.reference.torch_arrays import tensor_of
from localkv.quant_formats.base import split_blocks
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.quant_formats.shared.gpu.weight_layout import WeightLayout, tables_on, weight_layout

TILE_VALUES = 1 << 24
"""Values that are laid out at a time, which takes some bytes of scratch for each."""

LEAST_COLUMNS = 8
"""Columns of a matrix at least: a load takes as many values."""

LARGEST_F16 = 15
"""fp16 weights are scaled by a power of two such that none is above 2 ** LARGEST_F16."""


@dataclass(frozen=True, kw_only=True)
class PlaneTensor(PackedTensor):
    """A matrix, or a stack of them, as planes on a device.

    `rows` are empty: the file's bytes need not stay in memory, and are never read again.

    Attributes:
        planes: [rows of all matrices, ...] each (`shared/gpu/`).
        layout: how to read them.
        scale: a power of two by which values are multiplied where they are rounded to fp16, so
            that none overflows and few are subnormal.
    """

    planes: tuple[Tensor, ...]
    layout: WeightLayout
    scale: float

    @property
    def reads_rows(self) -> bool:
        return False

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """What kernels read: the planes, and the type's table if it has one."""
        return (*self.planes, *tables_on(self.planes[0].device, self.layout))

    @property
    def n_bytes(self) -> int:
        """Bytes of the planes."""
        return sum(plane.nbytes for plane in self.planes)

    def __getitem__(self, index: int | slice | Tensor) -> PackedTensor:
        raise TypeError("planes are not indexed: kernels read them whole")

    def decode(self) -> NDArray[np.float32]:
        raise TypeError("planes are not decoded: kernels read them")

    @property
    def needs_wide_index(self) -> bool:
        """A plane has more items than 32 bits can count."""
        return max(plane.numel() for plane in self.planes) >= 2**31


def prepare(weight: PackedTensor, device: torch.device) -> PlaneTensor:
    """A matrix [n_out, n_in] or a stack [n_experts, n_out, n_in] of the file, on `device`.

    Rows of fewer than 8 plain numbers become 8 long, with zeros (`PlaneTensor.shape`).

    Raises:
        ModelFileError: longer rows of plain numbers whose length is not a multiple of 8.
    """
    layout = weight_layout(weight.format)
    weight = _with_zeros(weight)
    n_in = weight.shape[-1]
    if n_in % LEAST_COLUMNS:
        raise ModelFileError(
            f"a {weight.format.name} matrix has {n_in} columns, which is not a multiple of 8",
            hint="use --device cpu",
        )
    rows = weight.rows.reshape(-1, weight.rows.shape[-1])
    step = max(1, TILE_VALUES // n_in)
    planes: tuple[Tensor, ...] = ()
    for start in range(0, len(rows), step):
        tile = rows[start : start + step]
        tile = (tile if isinstance(tile, Tensor) else tensor_of(tile)).to(device)
        parts = layout.planes(split_blocks(weight.format, tile))
        if not planes:
            planes = tuple(part.new_empty(len(rows), *part.shape[1:]) for part in parts)
        for plane, part in zip(planes, parts, strict=True):
            plane[start : start + step] = part
    return PlaneTensor(
        weight.format,
        rows[:, :0].reshape(*weight.rows.shape[:-1], 0),
        weight.shape,
        weight.halves_activations,
        planes=planes,
        layout=layout,
        scale=_fp16_scale(layout, planes),
    )


def _with_zeros(weight: PackedTensor) -> PackedTensor:
    """A matrix of at least `LEAST_COLUMNS`."""
    n_in, fmt = weight.shape[-1], weight.format
    if n_in >= LEAST_COLUMNS:
        return weight
    rows = weight.rows if isinstance(weight.rows, Tensor) else tensor_of(weight.rows)
    n_missing = fmt.row_bytes(LEAST_COLUMNS) - rows.shape[-1]
    zeros = rows.new_zeros(*rows.shape[:-1], n_missing)
    shape = (*weight.shape[:-1], LEAST_COLUMNS)
    return replace(weight, rows=torch.cat([rows, zeros], -1), shape=shape)


def _fp16_scale(layout: WeightLayout, planes: tuple[Tensor, ...]) -> float:
    if layout.bound is None:
        return 1.0
    bound = float(layout.bound(planes))
    if bound == 0 or not math.isfinite(bound):
        return 1.0
    return 2.0 ** min(LARGEST_F16 - math.frexp(bound)[1], 100)
