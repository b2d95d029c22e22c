"""q2_0: twice 2-bit codes less 3, and a scale; planes d, qs."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.quant_formats.shared.gpu.low_bit_rows import (
    load_two_bits,
    one_after_the_other,
    pack_two_bits,
    quarter_columns,
)
from localkv.quant_formats.shared.gpu.rows import (
    F16_LIMIT,
    as_f16,
    fitted_scale,
    in_blocks,
    limited_numbers,
    load_scales,
    repeat,
    scale_and_inverse,
    store_rows,
    truncated,
)
from localkv.triton_primitives.unpack import fence

PRODUCT = "fp16"
columns = quarter_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    a, b, c, e = load_two_bits(planes[1], first_row, rows, HEAD_DIM, WIDTH, 2, 3, PTX)
    d = repeat(load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 3), 8)
    low, high = one_after_the_other(a * d, c * d), one_after_the_other(b * d, e * d)
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    x = limited_numbers(in_blocks(x), 3 * F16_LIMIT)
    is_nan = x != x
    has_nan = tl.max(is_nan.to(tl.int32), 2) > 0
    d, inverse = scale_and_inverse(tl.max(tl.where(is_nan, 0.0, tl.abs(x)), 2), has_nan, 4.5)
    codes = truncated(x * inverse[:, :, None] * 0.5 + 2.0, 0, 3)
    q = codes.to(tl.float32) * 2.0 - 3.0
    d = fitted_scale(x * q, q * q, d)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(planes[1], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)
