"""The facts about a weight type's planes, and what types share to make and to read them.

A row is divided into *units* of `unit` values, and a tile of it is read in *parts*. Part p holds
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

from localkv.quant_formats.base import QuantFormat
from localkv.triton_primitives.unpack import unpack_bit_field

RUN = tl.constexpr(16)
"""Bytes of a load of codes."""
ALONG_ROW = tl.constexpr(2)
"""What loads of runs claim of their units: that two follow each other without a gap.

Triton lays the lanes of a warp along the dimension in which most addresses follow each other, and
without the claim those are a run and then the rows. Each lane would have another row, so a warp
would touch many, and activations, which all rows share, would be loaded again for each. The width
of a load is that of the run, whose addresses do follow each other.
"""


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


def codes_and_scales(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Planes of d (fp16) and codes as they are in the file."""
    d, qs = fields
    return qs.flatten(1).contiguous(), words(d.flatten(1), torch.float16)


def largest(plane: Tensor) -> Tensor:
    """Magnitude, float32 []."""
    return plane.float().abs().amax()


@triton.jit
def units_from(first, n_values, UNIT: tl.constexpr, VALUES: tl.constexpr):
    """Units of a row, the indices of those that VALUES values from `first` on are, and which of
    these there are."""
    n = n_values // UNIT
    at = first // UNIT + tl.arange(0, VALUES // UNIT)
    return n, at, at < n


@triton.jit
def load_runs(plane, row, per_row, at, ok, EVEN: tl.constexpr):
    """uint8 [rows, units, 16]: runs `at` [units] of each row; those that aren't `ok` are 0."""
    run = row[:, None] * per_row + at[None, :]
    pointers = plane + run[:, :, None] * RUN + tl.arange(0, RUN)[None, None, :]
    pointers = tl.max_contiguous(pointers, (1, ALONG_ROW, RUN))
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


@triton.jit
def load_floats(
    plane, row, first, n_values, RUN: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr
):
    """[rows, VALUES / RUN, RUN] from value `first` of each row on; 0 beyond its end."""
    at = first // RUN + tl.arange(0, VALUES // RUN)
    run = row[:, None] * (n_values // RUN) + at[None, :]
    pointers = plane + run[:, :, None] * RUN + tl.arange(0, RUN)[None, None, :]
    pointers = tl.max_contiguous(pointers, (1, ALONG_ROW, RUN))
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(at < n_values // RUN)[None, :, None], other=0)


def bit_fields(packed: Tensor, n_bits: int, run: int) -> Tensor:
    """`bits.bit_fields` of a tensor: uint8 [..., n_bytes] -> uint8 [..., n_bytes * 8 / n_bits]."""
    mask = (1 << n_bits) - 1
    runs = packed.view(*packed.shape[:-1], packed.shape[-1] // run, run)
    fields = [runs & mask]
    fields += [(runs >> shift) & mask for shift in range(n_bits, 8 - n_bits, n_bits)]
    fields += [runs >> (8 - n_bits)]
    return torch.stack(fields, dim=-2).flatten(-3)


def pack_bits(codes: Tensor, n_bits: int, run: int) -> Tensor:
    """`bits.pack_bits` of a tensor: uint8 [..., n] -> uint8 [..., n * n_bits / 8]."""
    n_fields = 8 // n_bits
    n_runs = codes.shape[-1] // (run * n_fields)
    fields = codes.view(*codes.shape[:-1], n_runs, n_fields, run)
    packed = fields[..., 0, :]
    for i in range(1, n_fields):
        packed = packed | (fields[..., i, :] << (i * n_bits))
    return packed.flatten(-2)


def in_runs(field: Tensor, n_bits: int, run: int) -> Tensor:
    """Codes packed in runs of `run` bytes, uint8 [rows, blocks, bytes] -> [rows, n], runs of 16."""
    return pack_bits(bit_fields(field, n_bits, run).flatten(1), n_bits, run=16)


def six_bit_planes(codes: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [rows, n] -> their low four and their high two bits, in the order of the codes."""
    return pack_bits(codes & 15, n_bits=4, run=1), pack_bits(codes >> 4, n_bits=2, run=1)


def halves(field: Tensor) -> Tensor:
    """A field of one fp16 number a block, as a plane."""
    return words(field.flatten(1), torch.float16)


@triton.jit
def six_bits(low, high, INDEX: tl.constexpr):
    """int32 words of `six_bit_planes` -> int32, code INDEX of a word."""
    return ((low >> (4 * INDEX)) & 15) | (((high >> (2 * INDEX)) & 3) << 4)


@triton.jit
def load_half(plane, row, n_values, at, ok, EVEN: tl.constexpr, UNIT: tl.constexpr):
    """fp32 [rows, units]: the number of the super block to which units `at` belong."""
    return load_items(plane, row, n_values // 256, at // (256 // UNIT), ok, EVEN).to(tl.float32)


def fifth_bits(qh: Tensor, run: int) -> Tensor:
    """uint8 [rows, blocks, bytes], packed in runs of `run` bytes -> the plane."""
    return pack_bits(bit_fields(qh, n_bits=1, run=run).flatten(1), n_bits=1, run=16)


@triton.jit
def two_parts(qs, above, row, n, at, ok, PART: tl.constexpr, OFFSET: tl.constexpr,
              EVEN: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Codes of parts PART (even) and PART + 1 of units `at` [units], fp16 [rows, units, 16] each;
    `above` are their fifth bits."""
    q = load_runs(qs, row, 4 * n, 4 * at + PART // 2, ok, EVEN)
    low = unpack_bit_field(q, above, 0, 4, PART, 1, OFFSET, PTX)
    return low, unpack_bit_field(q, above, 4, 4, PART + 1, 1, OFFSET, PTX)
