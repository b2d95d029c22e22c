"""q2_K: bits 2 p and 2 p + 1 of byte i of a run belong to value 16 p + i of a unit of 64; its four
scales and minima, four bits each, are a word."""

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
    words,
)
from localkv.triton_primitives.unpack import unpack_bit_field


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    scales, qs, d, dmin = fields
    return in_runs(qs, 2, run=32), words(scales.flatten(1), torch.int32), halves(d), halves(dmin)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, scales, d, dmin = planes
    n = n_values // 64
    at = first // 64 + tl.arange(0, VALUES // 64)
    ok = at < n
    q = load_runs(qs, row, n, at, ok, EVEN)
    word = load_items(scales, row, n, at, ok, EVEN)
    d = load_half(d, row, n_values, at, ok, EVEN, 64)
    dmin = load_half(dmin, row, n_values, at, ok, EVEN, 64)
    parts = ()
    for part in tl.static_range(4):
        codes = unpack_bit_field(q, q, 2 * part, 2, 0, 0, 0, PTX)
        scale = d * ((word >> (8 * part)) & 15).to(tl.float32)
        minimum = -dmin * ((word >> (8 * part + 4)) & 15).to(tl.float32)
        parts = parts + ((codes, scale, minimum),)
    return parts


LAYOUT = WeightLayout(64, read, planes, bound=lambda p: 15 * (3 * largest(p[2]) + largest(p[3])))
