"""q3_K: low bits as q2_K's codes, a plane of third bits as q5_0's of fifth ones, scales split into
their low four and high two bits, a word each for a unit of 128."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    halves,
    in_runs,
    largest,
    load_half,
    load_items,
    load_runs,
    q3_k_codes,
    six_bit_planes,
    six_bits,
    words,
)
from localkv.triton_primitives.unpack import unpack_bit_field


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    hmask, qs, scales, d = fields
    low, high = six_bit_planes(q3_k_codes(scales).flatten(1))
    return (
        in_runs(qs, 2, run=32),
        in_runs(hmask, 1, run=32),
        words(low, torch.int32),
        words(high, torch.int16),
        halves(d),
    )


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, hmask, lows, highs, d = planes
    n = n_values // 128
    at = first // 128 + tl.arange(0, VALUES // 128)
    ok = at < n
    above = load_runs(hmask, row, n, at, ok, EVEN)
    low = load_items(lows, row, n, at, ok, EVEN)
    high = load_items(highs, row, n, at, ok, EVEN).to(tl.int32)
    d = load_half(d, row, n_values, at, ok, EVEN, 128)
    parts = ()
    for half in tl.static_range(2):
        q = load_runs(qs, row, 2 * n, 2 * at + half, ok, EVEN)
        for quarter in tl.static_range(4):
            codes = unpack_bit_field(q, above, 2 * quarter, 2, 4 * half + quarter, 1, 4, PTX)
            scale = six_bits(low, high, 4 * half + quarter) - 32
            parts = parts + ((codes, d * scale.to(tl.float32)),)
    return parts


LAYOUT = WeightLayout(128, read, planes, bound=lambda p: 32 * 4 * largest(p[4]))
