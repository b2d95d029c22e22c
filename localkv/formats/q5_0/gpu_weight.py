"""q5_0: `qs` as in the file, a plane of fifth bits, and one of scales; rows in units of 128."""

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
    d, qh, qs = (padded_blocks(field, 4) for field in fields)
    return qs.flatten(1), fifth_bits(qh, run=1), words(d.flatten(1), torch.float16)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, qh, d = planes
    n = tl.cdiv(n_values, 128)
    at = first // 128 + tl.arange(0, VALUES // 128)
    ok = at < n
    above = load_runs(qh, row, n, at, ok, EVEN)
    parts = ()
    for part in tl.static_range(0, 8, 2):
        low, high = two_parts(qs, above, row, n, at, ok, part, 16, EVEN, PTX)
        scale = load_items(d, row, 4 * n, 4 * at + part // 2, ok, EVEN).to(tl.float32)
        parts = parts + ((low, scale), (high, scale))
    return parts


LAYOUT = WeightLayout(128, read, planes, bound=lambda p: 16 * largest(p[2]))
