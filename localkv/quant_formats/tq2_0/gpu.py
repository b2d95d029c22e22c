"""tq2_0: bits 2 p and 2 p + 1 of byte i of a run belong to value 16 p + i of a unit of 64."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    halves,
    in_runs,
    largest,
    load_half,
    load_runs,
)
from localkv.triton_primitives.unpack import unpack_bit_field


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    qs, d = fields
    return in_runs(qs, 2, run=32), halves(d)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, d = planes
    n = n_values // 64
    at = first // 64 + tl.arange(0, VALUES // 64)
    ok = at < n
    q = load_runs(qs, row, n, at, ok, EVEN)
    scale = load_half(d, row, n_values, at, ok, EVEN, 64)
    parts = ()
    for part in tl.static_range(4):
        parts = parts + ((unpack_bit_field(q, q, 2 * part, 2, 0, 0, 1, PTX), scale),)
    return parts


LAYOUT = WeightLayout(64, read, planes, bound=lambda p: 2 * largest(p[1]))
