"""iq2_s: runs of 16 bytes for 64 values, a word of codes and one of signs, twice; a word of codes'
upper bits and scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.grid_points import (
    bits_of,
    byte_of,
    entry_words,
    grid_table,
    load_beside,
    load_four_words,
    sign_words,
    signed_eights,
    units_from,
)
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    halves,
    largest,
    load_half,
    words,
)
from localkv.quant_formats.shared.grids import IQ2_S


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, qs, signs, qh, scales = fields
    codes = entry_words(qs.flatten(1))
    both = torch.stack([codes, sign_words(bits_of(signs.flatten(1).unflatten(1, (-1, 4))))], -1)
    small = torch.stack([qh.unflatten(-1, (4, 2)), scales.unflatten(-1, (4, 2))], -2)
    return both.flatten(1), words(small.flatten(1), torch.int32), halves(d)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, small, d, table = planes
    n, at, ok = units_from(first, n_values, VALUES)
    found = load_four_words(qs, row, n, at, ok, EVEN)
    above = load_beside(small, row, n, at, ok, EVEN)
    d = load_half(d, row, n_values, at, ok, EVEN, 64) * 0.125
    parts = ()
    for group in tl.static_range(2):
        q, signs = found[2 * group], found[2 * group + 1]
        for i in tl.static_range(0, 4, 2):
            a = byte_of(q, i) | (((above >> (8 * group + 2 * i)) & 3) << 8)
            b = byte_of(q, i + 1) | (((above >> (8 * group + 2 * i + 2)) & 3) << 8)
            scale = d * (2 * ((above >> (16 + 8 * group + 2 * i)) & 15) + 1).to(tl.float32)
            parts = parts + ((signed_eights(table, a, b, signs, i, PTX), scale),)
    return parts


LAYOUT = WeightLayout(
    64,
    read,
    planes,
    bound=lambda p: 43 * 31 / 8 * largest(p[2]),
    table=lambda: grid_table(IQ2_S),
)
