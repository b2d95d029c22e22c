"""q6_K: low bits as q4_0's; bits 2 p and 2 p + 1 of byte i of a run of high bits belong to value
16 p + i of a unit of 64, whose four scales are a word."""

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
    ql, qh, scales, d = fields
    low, high = in_runs(ql, 4, run=64), in_runs(qh, 2, run=32)
    return low, high, words(scales.flatten(1), torch.int32), halves(d)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    ql, qh, scales, d = planes
    n = n_values // 64
    at = first // 64 + tl.arange(0, VALUES // 64)
    ok = at < n
    above = load_runs(qh, row, n, at, ok, EVEN)
    word = load_items(scales, row, n, at, ok, EVEN)
    d = load_half(d, row, n_values, at, ok, EVEN, 64)
    parts = ()
    for group in tl.static_range(2):
        q = load_runs(ql, row, 2 * n, 2 * at + group, ok, EVEN)
        for half in tl.static_range(2):
            codes = unpack_bit_field(q, above, 4 * half, 4, 4 * group + 2 * half, 2, 32, PTX)
            scale = (word << (24 - 16 * group - 8 * half)) >> 24
            parts = parts + ((codes, d * scale.to(tl.float32)),)
    return parts


LAYOUT = WeightLayout(64, read, planes, bound=lambda p: 128 * 32 * largest(p[3]))
