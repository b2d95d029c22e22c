"""iq4_nl: as q4_0, but codes are places in a table."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.bits import IQ4_CODEBOOK
from localkv.formats.gpu.weight_layout import (
    WeightLayout,
    largest,
    load_items,
    load_runs,
)
from localkv.formats.q4_0.gpu_weight import planes
from localkv.triton_primitives.unpack import unpack_codebook

CODEBOOK = tl.constexpr(IQ4_CODEBOOK)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, d = planes
    n = n_values // 32
    at = first // 32 + tl.arange(0, VALUES // 32)
    ok = at < n
    low, high = unpack_codebook(load_runs(qs, row, n, at, ok, EVEN), CODEBOOK, PTX)
    scale = load_items(d, row, n, at, ok, EVEN).to(tl.float32)
    return (low, scale), (high, scale)


LAYOUT = WeightLayout(32, read, planes, bound=lambda p: 127 * largest(p[1]))
