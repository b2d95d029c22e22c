"""iq4_xs: codes as iq4_nl's, scales split as q3_K's, a word each for a unit of 128."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.iq4_nl.gpu import CODEBOOK
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    halves,
    iq4_xs_codes,
    largest,
    load_half,
    load_items,
    load_runs,
    six_bit_planes,
    six_bits,
    words,
)
from localkv.triton_primitives.unpack import unpack_codebook


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, scales_h, scales_l, qs = fields
    low, high = six_bit_planes(iq4_xs_codes(scales_h, scales_l).flatten(1))
    return qs.flatten(1), words(low, torch.int16), high, halves(d)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, lows, highs, d = planes
    n = n_values // 128
    at = first // 128 + tl.arange(0, VALUES // 128)
    ok = at < n
    low = load_items(lows, row, n, at, ok, EVEN).to(tl.int32)
    high = load_items(highs, row, n, at, ok, EVEN).to(tl.int32)
    d = load_half(d, row, n_values, at, ok, EVEN, 128)
    parts = ()
    for group in tl.static_range(4):
        q = load_runs(qs, row, 4 * n, 4 * at + group, ok, EVEN)
        a, b = unpack_codebook(q, CODEBOOK, PTX)
        scale = d * (six_bits(low, high, group) - 32).to(tl.float32)
        parts = parts + ((a, scale), (b, scale))
    return parts


LAYOUT = WeightLayout(128, read, planes, bound=lambda p: 32 * 127 * largest(p[3]))
