"""iq1_m: two words of codes' lower bytes for 64 values, one of upper bits and shifts; scales as in
the file, a quarter of d's bits above each four."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.grid_points import (
    CENTRE,
    byte_of,
    entry_words,
    grid_table,
    load_beside,
    load_two_words,
    offset_of,
    shifted_eights,
    units_from,
)
from localkv.quant_formats.shared.gpu.weight_layout import WeightLayout, largest, load_items, words
from localkv.quant_formats.shared.grids import IQ1


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    qs, qh, scales = fields
    upper, small = words(qh.flatten(1), torch.int32), words(scales.flatten(1), torch.int16)
    return entry_words(qs.flatten(1)), upper, small


@triton.jit
def scale_of_block(scales, row, n, at, ok, EVEN: tl.constexpr):
    """fp32 [rows, units]: d of the super blocks to which units `at` belong."""
    bits = tl.zeros((row.shape[0], at.shape[0]), tl.int32)
    for quarter in tl.static_range(4):
        word = load_items(scales, row, n, at // 4 * 4 + quarter, ok, EVEN).to(tl.int32)
        bits = bits | (((word >> 12) & 15) << (4 * quarter))
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, qh, scales, table = planes
    n, at, ok = units_from(first, n_values, VALUES)
    found = load_two_words(qs, row, n, at, ok, EVEN)
    above = load_beside(qh, row, n, at, ok, EVEN)
    small = load_items(scales, row, n, at, ok, EVEN).to(tl.int32)
    d = scale_of_block(scales, row, n, at, ok, EVEN) * 0.125
    parts = ()
    for part in tl.static_range(4):
        q, word = found[part // 2], above >> (8 * part)
        a = byte_of(q, 2 * (part % 2)) | ((word & 7) << 8)
        b = byte_of(q, 2 * (part % 2) + 1) | (((word >> 4) & 7) << 8)
        codes = shifted_eights(table, a, b, offset_of(word >> 3), offset_of(word >> 7), PTX)
        parts = parts + ((codes, d * (2 * ((small >> (3 * part)) & 7) + 1).to(tl.float32)),)
    return parts


def bound(planes: tuple[Tensor, ...]) -> Tensor:
    quarters = (planes[2].unflatten(1, (-1, 4)) >> 12).to(torch.int32) & 15
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=quarters.device)
    d = (quarters << shifts).sum(-1).to(torch.int16).view(torch.float16)
    return 9 * 15 / 8 * largest(d)


LAYOUT = WeightLayout(64, read, planes, bound, table=lambda: grid_table(IQ1, 8, CENTRE))
