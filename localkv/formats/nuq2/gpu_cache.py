"""nuq2: codes of 2 bits that select from a codebook; planes d, o, qs, and the codebook."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.codebook_rows import (
    PAIR,
    load_words,
    quarters_with_outliers,
    values_of_two_bits,
    write_codes,
)
from localkv.formats.gpu.low_bit_rows import one_after_the_other, pack_two_bits, quarter_columns
from localkv.formats.gpu.planes import load_rows, store_rows
from localkv.triton_primitives.codebooks import numbers_of_two_bits
from localkv.triton_primitives.fence import fence

PRODUCT = "fp16"
columns = quarter_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[2], first_row, valid.shape[0], 0, WIDTH // 4, HEAD_DIM // 4)
    if PTX and HEAD_DIM >= PAIR:
        a, b, c, e = values_of_two_bits(qs, planes, first_row, valid, HEAD_DIM, WIDTH)
    else:
        a, b, c, e = numbers_of_two_bits(qs, load_words(planes[3], 1))
        a, b, c, e = quarters_with_outliers(a, b, c, e, planes, first_row, valid, HEAD_DIM, WIDTH)
    low, high = one_after_the_other(a, c), one_after_the_other(b, e)
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    codes = write_codes(planes, rows, valid, x, HEAD_DIM, WIDTH, 4)
    store_rows(planes[2], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)
