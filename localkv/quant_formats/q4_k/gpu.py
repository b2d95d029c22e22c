"""q4_K: codes as q4_0's; a plane each of the low and high bits of scales, of d and of dmin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    in_runs,
    largest,
    load_half,
    load_items,
    load_runs,
    scales_and_minima,
    six_bits,
)
from localkv.triton_primitives.unpack import unpack_nibbles


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return in_runs(fields[3], 4, run=32), *scales_and_minima(fields, torch.int16, torch.uint8)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, lows, highs, d, dmin = planes
    n = n_values // 64
    at = first // 64 + tl.arange(0, VALUES // 64)
    ok = at < n
    low = load_items(lows, row, n, at, ok, EVEN).to(tl.int32)
    high = load_items(highs, row, n, at, ok, EVEN).to(tl.int32)
    d = load_half(d, row, n_values, at, ok, EVEN, 64)
    dmin = load_half(dmin, row, n_values, at, ok, EVEN, 64)
    parts = ()
    for group in tl.static_range(2):
        q = load_runs(qs, row, 2 * n, 2 * at + group, ok, EVEN)
        a, b = unpack_nibbles(q, 0, PTX)
        scale = d * six_bits(low, high, 2 * group).to(tl.float32)
        minimum = -dmin * six_bits(low, high, 2 * group + 1).to(tl.float32)
        parts = parts + ((a, scale, minimum), (b, scale, minimum))
    return parts


LAYOUT = WeightLayout(64, read, planes, bound=lambda p: 63 * (15 * largest(p[3]) + largest(p[4])))
