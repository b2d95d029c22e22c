"""The facts about a type's planes, and the loads that the readers share.

A row is divided into *units* of `unit` values, and a tile of it is read in *parts*: part p holds
values p * run to p * run + run - 1 of each unit. A part is a tuple of one to three:

    codes    fp16 or fp32 [rows, units, run], exact
    scales   fp32 [rows, units] factor of the codes
    minima   fp32 [rows, units] that is added then

Fields that a type lacks are left out: Triton 3.6 takes no None in a tuple that a function returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from localkv.formats.base import QuantFormat

RUN = tl.constexpr(16)
"""Bytes of a load of codes."""


@dataclass(frozen=True)
class WeightLayout:
    """The facts about a type that a product needs.

    Attributes:
        unit: values of a unit; a row whose length is no multiple is padded with zeros.
        read: `(planes, row [rows], first value, values of a row, VALUES, EVEN, PTX)` -> a tuple of
            parts of a tile, VALUES wide. EVEN: the tile doesn't reach beyond the row.
        planes: a block's fields (uint8 [rows, blocks, bytes]) -> planes, [rows, ...] each.
        bound: planes -> at least the largest magnitude of `codes * scales` and `minima`, or None
            where values are fp16 anyway.
        is_exact: products must not round its values to fp16.
        table: makes what `read` finds after the planes, the same for all matrices; or None.
    """

    unit: int
    read: Any
    planes: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    bound: Callable[[tuple[Tensor, ...]], Tensor] | None
    is_exact: bool = False
    table: Callable[[], Tensor] | None = None


@cache
def tables_on(device: torch.device, layout: WeightLayout) -> tuple[Tensor, ...]:
    """What follows the planes, in the device's memory."""
    return () if layout.table is None else (layout.table().to(device),)


def weight_layout(fmt: QuantFormat) -> WeightLayout:
    """The layout in the format's `gpu.py`; the first use imports it."""
    return cast(WeightLayout, fmt.part("gpu").LAYOUT)


def padded_blocks(field: Tensor, multiple: int) -> Tensor:
    """uint8 [rows, blocks, bytes], padded with blocks of zeros to a multiple."""
    return F.pad(field, (0, 0, 0, -field.shape[1] % multiple))


def words(plane: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [rows, n] -> the same bytes as words of `dtype`."""
    return plane.contiguous().view(dtype)


def largest(plane: Tensor) -> Tensor:
    """Magnitude, float32 []."""
    return plane.float().abs().amax()


@triton.jit
def load_runs(plane, row, per_row, at, ok, EVEN: tl.constexpr):
    """uint8 [rows, units, 16]: runs `at` [units] of each row; those that aren't `ok` are 0."""
    run = row[:, None] * per_row + at[None, :]
    pointers = plane + run[:, :, None] * RUN + tl.arange(0, RUN)[None, None, :]
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=ok[None, :, None], other=0)


@triton.jit
def load_items(plane, row, per_row, at, ok, EVEN: tl.constexpr):
    """[rows, units]: items `at` [units] of each row; those that aren't `ok` are 0."""
    pointers = plane + row[:, None] * per_row + at[None, :]
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=ok[None, :], other=0)
