"""q4_1: `qs` as in the file, 16 bytes a block, a plane of scales and one of minima."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.formats.gpu.weight_layout import (
    WeightLayout,
    largest,
    load_items,
    load_runs,
    words,
)
from localkv.triton_primitives.unpack import unpack_nibbles


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, m, qs = fields
    scales, minima = (words(field.flatten(1), torch.float16) for field in (d, m))
    return qs.flatten(1).contiguous(), scales, minima


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, d, m = planes
    n = n_values // 32
    at = first // 32 + tl.arange(0, VALUES // 32)
    ok = at < n
    low, high = unpack_nibbles(load_runs(qs, row, n, at, ok, EVEN), 0, PTX)
    scale = load_items(d, row, n, at, ok, EVEN).to(tl.float32)
    minimum = load_items(m, row, n, at, ok, EVEN).to(tl.float32)
    return (low, scale, minimum), (high, scale, minimum)


LAYOUT = WeightLayout(32, read, planes, bound=lambda p: 15 * largest(p[1]) + largest(p[2]))
