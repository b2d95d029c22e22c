"""nuq3: codes of 3 bits that select from a codebook; planes d, o, qh, qs, and the codebook."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.codebook_rows import (
    PAIR,
    load_words,
    quarters_with_outliers,
    values_of_three_bits,
    write_codes,
)
from localkv.formats.gpu.low_bit_rows import (
    load_third_bits,
    one_after_the_other,
    pack_third_bits,
    pack_two_bits,
    quarter_columns,
)
from localkv.formats.gpu.planes import as_i32, load_rows, store_rows
from localkv.triton_primitives.codebooks import numbers_of_three_bits
from localkv.triton_primitives.fence import fence

PRODUCT = "fp16"
columns = quarter_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    qs = load_rows(planes[3], first_row, rows, 0, WIDTH // 4, HEAD_DIM // 4)
    thirds, lane = load_third_bits(planes[2], first_row, rows, HEAD_DIM, WIDTH)
    if PTX and HEAD_DIM >= PAIR:
        a, b, c, e = values_of_three_bits(qs, thirds, planes, first_row, valid, HEAD_DIM, WIDTH)
    else:
        a, b, c, e = numbers_of_three_bits(qs, thirds, lane, load_words(planes[4], 2))
        a, b, c, e = quarters_with_outliers(a, b, c, e, planes, first_row, valid, HEAD_DIM, WIDTH)
    low, high = one_after_the_other(a, c), one_after_the_other(b, e)
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    codes = write_codes(planes, rows, valid, x, HEAD_DIM, WIDTH, 8)
    store_rows(as_i32(planes[2]), rows, valid, pack_third_bits(codes), HEAD_DIM // 32)
    store_rows(planes[3], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)
