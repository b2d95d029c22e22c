"""q5_K: codes as q5_0's, scales as q4_K's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    fifth_bits,
    in_runs,
    largest,
    load_half,
    load_items,
    load_runs,
    scales_and_minima,
    six_bits,
    two_parts,
)


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    qh, qs = fields[3:]
    scales = scales_and_minima(fields, torch.int32, torch.int16)
    return in_runs(qs, 4, run=32), fifth_bits(qh, run=32), *scales


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, qh, lows, highs, d, dmin = planes
    n = n_values // 128
    at = first // 128 + tl.arange(0, VALUES // 128)
    ok = at < n
    low = load_items(lows, row, n, at, ok, EVEN)
    high = load_items(highs, row, n, at, ok, EVEN).to(tl.int32)
    d = load_half(d, row, n_values, at, ok, EVEN, 128)
    dmin = load_half(dmin, row, n_values, at, ok, EVEN, 128)
    above = load_runs(qh, row, n, at, ok, EVEN)
    parts = ()
    for group in tl.static_range(4):
        a, b = two_parts(qs, above, row, n, at, ok, 2 * group, 0, EVEN, PTX)
        scale = d * six_bits(low, high, 2 * group).to(tl.float32)
        minimum = -dmin * six_bits(low, high, 2 * group + 1).to(tl.float32)
        parts = parts + ((a, scale, minimum), (b, scale, minimum))
    return parts


LAYOUT = WeightLayout(128, read, planes, bound=lambda p: 63 * (31 * largest(p[4]) + largest(p[5])))
