"""mxfp4: as iq4_nl, but scales are powers of two, a byte each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.bits import MXFP4_TWICE
from localkv.quant_formats.shared.gpu.weight_layout import WeightLayout, load_items, load_runs
from localkv.triton_primitives.unpack import unpack_codebook

TABLE = tl.constexpr(MXFP4_TWICE)


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    e, qs = fields
    return qs.flatten(1).contiguous(), e.flatten(1).contiguous()


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, exponents = planes
    n = n_values // 32
    at = first // 32 + tl.arange(0, VALUES // 32)
    ok = at < n
    low, high = unpack_codebook(load_runs(qs, row, n, at, ok, EVEN), TABLE, PTX)
    e = load_items(exponents, row, n, at, ok, EVEN).to(tl.int32)
    # the exponent of a float32 is e - 1; e = 0 and 1 are subnormal
    bits = tl.where(e > 1, (e - 1) << 23, (1 << 21) << e)
    scale = bits.to(tl.float32, bitcast=True)
    return (low, scale), (high, scale)


def bound(planes: tuple[Tensor, ...]) -> Tensor:
    return 12 * torch.ldexp(torch.ones(()), planes[1].amax().cpu().int() - 128)


LAYOUT = WeightLayout(32, read, planes, bound)
