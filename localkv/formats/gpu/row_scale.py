"""fp16 numbers of a whole row, in planes of their own: a scale, `x = d * value`, or a minimum."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.planes import as_f16, as_i32
from localkv.formats.gpu.rounding import NAN
from localkv.triton_primitives.saturate import F16_MAX, largest_scale, saturate

SMALLEST = tl.constexpr(2.0**-24)


@triton.jit
def load_row_scales(plane, first_row, valid, LARGEST: tl.constexpr):
    """fp16 [rows, 1]; 0 for rows that aren't `valid`; limited as `load_scales` limits them.

    Loaded as words of two rows, since 2 bytes aren't copied to shared memory in the background;
    tiles begin at even rows.
    """
    n = tl.arange(0, valid.shape[0])
    word = tl.load(as_i32(plane) + ((first_row + n) // 2), mask=valid, other=0)
    bits = (word >> (n % 2 * 16)).to(tl.uint16)
    return saturate(bits.to(tl.float16, bitcast=True), largest_scale(LARGEST))[:, None]


@triton.jit
def scale_rows(x, LARGEST_CODE: tl.constexpr):
    """fp16 scales [rows], absmax / LARGEST_CODE rounded up, and x [rows, n] divided by them.

    The scale of a row with a NaN is NaN.
    """
    is_nan = x != x
    has_nan = tl.max(is_nan.to(tl.int32), 1) > 0
    exact = tl.div_rn(tl.max(tl.where(is_nan, 0.0, tl.abs(x)), 1), LARGEST_CODE)
    exact = tl.minimum(tl.maximum(exact, SMALLEST), F16_MAX)
    nearest = exact.to(tl.float16)
    # of positive numbers the next larger one has the next larger bits
    too_small = (nearest.to(tl.float32) < exact).to(tl.int16)
    d = (nearest.to(tl.int16, bitcast=True) + too_small).to(tl.float16, bitcast=True)
    d = tl.where(has_nan, NAN, d.to(tl.float32))
    return d.to(tl.float16), tl.div_rn(x, tl.broadcast_to(d[:, None], x.shape))


@triton.jit
def store_row_halves(plane, rows, valid, x):
    """Of x [rows], fp16, those that are `valid`; a plane is one pointer, or [rows, 1]."""
    if len(plane.shape) > 0:
        tl.store(as_f16(plane) + rows[:, None], x[:, None], mask=valid[:, None])
    else:
        tl.store(as_f16(plane) + rows, x, mask=valid)
