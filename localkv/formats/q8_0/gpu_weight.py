"""q8_0: `qs` as in the file, two runs a block, and a plane of scales."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.weight_layout import (
    WeightLayout,
    largest,
    load_items,
    load_runs,
)
from localkv.formats.q4_0.gpu_weight import planes
from localkv.triton_primitives.unpack import unpack_signed_bytes


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, d = planes
    n = n_values // 32
    at = first // 32 + tl.arange(0, VALUES // 32)
    ok = at < n
    scale = load_items(d, row, n, at, ok, EVEN).to(tl.float32)
    low = unpack_signed_bytes(load_runs(qs, row, 2 * n, 2 * at, ok, EVEN), PTX)
    high = unpack_signed_bytes(load_runs(qs, row, 2 * n, 2 * at + 1, ok, EVEN), PTX)
    return (low, scale), (high, scale)


LAYOUT = WeightLayout(32, read, planes, bound=lambda p: 128 * largest(p[1]))
