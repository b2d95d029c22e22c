"""Four-bit floats on a GPU: codes are places in a table."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.fp4 import TWICE
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    in_runs,
    load_items,
    load_runs,
    units_from,
    words,
)
from localkv.triton_primitives.unpack import unpack_codebook

TABLE = tl.constexpr(TWICE)


def planes_mxfp4(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Planes like iq4_nl's; scales are powers of two, a byte each."""
    e, qs = fields
    return qs.flatten(1).contiguous(), e.flatten(1).contiguous()


@triton.jit
def read_mxfp4(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, exponents = planes
    n, at, ok = units_from(first, n_values, 32, VALUES)
    low, high = unpack_codebook(load_runs(qs, row, n, at, ok, EVEN), TABLE, PTX)
    e = load_items(exponents, row, n, at, ok, EVEN).to(tl.int32)
    # the exponent of a float32 is e - 1; e = 0 and 1 are subnormal
    bits = tl.where(e > 1, (e - 1) << 23, (1 << 21) << e)
    scale = bits.to(tl.float32, bitcast=True)
    return (low, scale), (high, scale)


def bound_mxfp4(planes: tuple[Tensor, ...]) -> Tensor:
    return 12 * torch.ldexp(torch.ones(()), planes[1].amax().cpu().int() - 128)


mxfp4 = SimpleNamespace(LAYOUT=WeightLayout(32, read_mxfp4, planes_mxfp4, bound_mxfp4))


def planes_nvfp4(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Two runs of codes for 64 values, as mxfp4's, and a word of four scales."""
    d, qs = fields
    return in_runs(qs, 4, run=8), words(d.flatten(1), torch.int32)


@triton.jit
def half_of_e4m3_nvfp4(code):
    """fp32: half of the fp8 number in the lowest byte of `code`, which has no sign; 127 is 0.

    Its bits are an fp32 number's, 2 ** 120 too small, subnormal ones too.
    """
    value = ((code & 127) << 20).to(tl.float32, bitcast=True) * 6.646139978924579e35
    return tl.where((code & 255) == 127, 0.0, value)


@triton.jit
def read_nvfp4(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, scales = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
    word = load_items(scales, row, n, at, ok, EVEN)
    parts = ()
    for half in tl.static_range(2):
        q = load_runs(qs, row, 2 * n, 2 * at + half, ok, EVEN)
        low, high = unpack_codebook(q, TABLE, PTX)
        parts = parts + ((low, half_of_e4m3_nvfp4(word >> (16 * half))),)
        parts = parts + ((high, half_of_e4m3_nvfp4(word >> (16 * half + 8))),)
    return parts


def bound_nvfp4(planes: tuple[Tensor, ...]) -> Tensor:
    largest_code = (planes[1].view(torch.uint8) & 127).amax().cpu().int()
    mantissa = torch.where(largest_code < 8, 1, 8 + largest_code % 8)
    return 12 * torch.ldexp(mantissa.float(), largest_code // 8 - 11)


nvfp4 = SimpleNamespace(LAYOUT=WeightLayout(64, read_nvfp4, planes_nvfp4, bound_nvfp4))
