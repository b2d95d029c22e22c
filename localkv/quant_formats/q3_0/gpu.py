"""q3_0: 3-bit codes less 4 and a scale; planes d, qh, qs."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.quant_formats.shared.gpu.low_bit_rows import (
    load_three_bits,
    one_after_the_other,
    pack_third_bits,
    pack_two_bits,
    quarter_columns,
)
from localkv.quant_formats.shared.gpu.rows import (
    F16_LIMIT,
    as_f16,
    as_i32,
    fitted_scale,
    in_blocks,
    limited_numbers,
    load_scales,
    repeat,
    store_rows,
    symmetric_codes,
)
from localkv.triton_primitives.unpack import fence

PRODUCT = "fp16"
columns = quarter_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    a, b, c, e = load_three_bits(planes[2], planes[1], first_row, rows, HEAD_DIM, WIDTH, 4, PTX)
    d = repeat(load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 4), 8)
    low, high = one_after_the_other(a * d, c * d), one_after_the_other(b * d, e * d)
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    x = limited_numbers(in_blocks(x), 4 * F16_LIMIT)
    d, codes = symmetric_codes(x, 3)
    q = codes.to(tl.float32) - 4.0
    d = fitted_scale(x * q, q * q, d)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_i32(planes[1]), rows, valid, pack_third_bits(codes), HEAD_DIM // 32)
    store_rows(planes[2], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)
