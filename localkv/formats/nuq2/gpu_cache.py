"""nuq2: codes of 2 bits that select from a codebook; planes d, o, qs, and the codebook."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.codebook_rows import look_up, scaled_with_outliers, write_codes
from localkv.formats.gpu.low_bit_rows import (
    load_two_bits,
    one_after_the_other,
    pack_two_bits,
    quarter_columns,
)
from localkv.formats.gpu.planes import store_rows
from localkv.triton_primitives.fence import fence

PRODUCT = "fp16"
columns = quarter_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    a, b, c, e = load_two_bits(planes[2], first_row, rows, HEAD_DIM, WIDTH, 0, PTX)
    low = look_up(planes[3], one_after_the_other(a, c))
    high = look_up(planes[3], one_after_the_other(b, e))
    low, high = scaled_with_outliers(
        low, high, quarter_columns(WIDTH), planes, first_row, valid, HEAD_DIM, WIDTH, True
    )
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    codes = write_codes(planes, rows, valid, x, HEAD_DIM, WIDTH, 4)
    store_rows(planes[2], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)
