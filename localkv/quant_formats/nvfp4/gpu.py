"""nvfp4: two runs of codes for 64 values, as mxfp4's, and a word of four scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.bits import MXFP4_TWICE
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    in_runs,
    load_items,
    load_runs,
    words,
)
from localkv.triton_primitives.unpack import unpack_codebook

TABLE = tl.constexpr(MXFP4_TWICE)


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, qs = fields
    return in_runs(qs, 4, run=8), words(d.flatten(1), torch.int32)


@triton.jit
def half_of_e4m3(code):
    """fp32: half of the fp8 number in the lowest byte of `code`, which has no sign; 127 is 0.

    Its bits are an fp32 number's, 2 ** 120 too small, subnormal ones too.
    """
    value = ((code & 127) << 20).to(tl.float32, bitcast=True) * 6.646139978924579e35
    return tl.where((code & 255) == 127, 0.0, value)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, scales = planes
    n = n_values // 64
    at = first // 64 + tl.arange(0, VALUES // 64)
    ok = at < n
    word = load_items(scales, row, n, at, ok, EVEN)
    parts = ()
    for half in tl.static_range(2):
        q = load_runs(qs, row, 2 * n, 2 * at + half, ok, EVEN)
        low, high = unpack_codebook(q, TABLE, PTX)
        parts = parts + ((low, half_of_e4m3(word >> (16 * half))),)
        parts = parts + ((high, half_of_e4m3(word >> (16 * half + 8))),)
    return parts


def bound(planes: tuple[Tensor, ...]) -> Tensor:
    largest_code = (planes[1].view(torch.uint8) & 127).amax().cpu().int()
    mantissa = torch.where(largest_code < 8, 1, 8 + largest_code % 8)
    return 12 * torch.ldexp(mantissa.float(), largest_code // 8 - 11)


LAYOUT = WeightLayout(64, read, planes, bound)
