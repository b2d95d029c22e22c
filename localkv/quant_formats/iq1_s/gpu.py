"""iq1_s: two words of codes' lower bytes for 64 values, and one of all else but d."""

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
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    halves,
    largest,
    load_half,
    words,
)
from localkv.quant_formats.shared.grids import IQ1


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, qs, qh = fields
    return entry_words(qs.flatten(1)), words(qh.flatten(1), torch.int32), halves(d)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, qh, d, table = planes
    n, at, ok = units_from(first, n_values, VALUES)
    found = load_two_words(qs, row, n, at, ok, EVEN)
    above = load_beside(qh, row, n, at, ok, EVEN)
    d = load_half(d, row, n_values, at, ok, EVEN, 64) * 0.125
    parts = ()
    for group in tl.static_range(2):
        q, word = found[group], above >> (16 * group)
        scale = d * (2 * ((word >> 12) & 7) + 1).to(tl.float32)
        offset = offset_of(word >> 15)
        for i in tl.static_range(0, 4, 2):
            a = byte_of(q, i) | (((word >> (3 * i)) & 7) << 8)
            b = byte_of(q, i + 1) | (((word >> (3 * i + 3)) & 7) << 8)
            parts = parts + ((shifted_eights(table, a, b, offset, offset, PTX), scale),)
    return parts


LAYOUT = WeightLayout(
    64,
    read,
    planes,
    bound=lambda p: 9 * 15 / 8 * largest(p[2]),
    table=lambda: grid_table(IQ1, 8, CENTRE),
)
