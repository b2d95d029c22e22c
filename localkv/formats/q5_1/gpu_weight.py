"""q5_1: as q5_0, and a plane of minima; rows in units of 128."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.formats.gpu.five_bit_weights import fifth_bits, two_parts
from localkv.formats.gpu.weight_layout import (
    WeightLayout,
    largest,
    load_items,
    load_runs,
    padded_blocks,
    words,
)


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, m, qh, qs = (padded_blocks(field, 4) for field in fields)
    scales, minima = (words(field.flatten(1), torch.float16) for field in (d, m))
    return qs.flatten(1), fifth_bits(qh, run=1), scales, minima


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, qh, d, m = planes
    n = tl.cdiv(n_values, 128)
    at = first // 128 + tl.arange(0, VALUES // 128)
    ok = at < n
    above = load_runs(qh, row, n, at, ok, EVEN)
    parts = ()
    for part in tl.static_range(0, 8, 2):
        low, high = two_parts(qs, above, row, n, at, ok, part, 0, EVEN, PTX)
        scale = load_items(d, row, 4 * n, 4 * at + part // 2, ok, EVEN).to(tl.float32)
        minimum = load_items(m, row, 4 * n, 4 * at + part // 2, ok, EVEN).to(tl.float32)
        parts = parts + ((low, scale, minimum), (high, scale, minimum))
    return parts


LAYOUT = WeightLayout(128, read, planes, bound=lambda p: 31 * largest(p[2]) + largest(p[3]))
