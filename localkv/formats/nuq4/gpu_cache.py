"""nuq4: nibbles that select from a codebook; planes d, o, qs, and the codebook."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.codebook_rows import (
    PAIR,
    add_outliers,
    load_outliers,
    load_words,
    values_of_nibbles,
    write_codes,
)
from localkv.formats.gpu.planes import load_rows, load_scales, nibble_columns, repeat, store_rows
from localkv.formats.gpu.rounding import pack_nibbles
from localkv.triton_primitives.codebooks import numbers_of_nibbles
from localkv.triton_primitives.fence import fence

PRODUCT = "fp16"
UNIT = 16.0
columns = nibble_columns

LARGEST_MISSING = tl.constexpr(32768.0)
"""Half of fp16's range, as the largest number has beside the largest scale."""
FINITE = tl.constexpr(65504 / 256)
"""What times the largest scale, 256, is finite in fp16."""
OVER_UNIT = tl.constexpr(1 / UNIT)


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[2], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    if PTX and HEAD_DIM >= PAIR:
        low, high = values_of_nibbles(qs, planes, first_row, valid, HEAD_DIM, WIDTH)
    else:
        low, high = numbers_of_nibbles(qs, load_words(planes[3], 4))
        scales = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, FINITE)
        d = repeat(scales, 16)
        low, high = low * d, high * d
        if HEAD_DIM >= PAIR:
            limit = tl.full((1, 1), LARGEST_MISSING, tl.float16)
            missing, place = load_outliers(planes[1], limit, first_row, valid, HEAD_DIM, WIDTH)
            channel, _ = nibble_columns(WIDTH)
            low = add_outliers(low, missing, place, channel, 0)
            high = add_outliers(high, missing, place, channel, 16)
        low, high = low * OVER_UNIT, high * OVER_UNIT
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    codes = write_codes(planes, rows, valid, x, HEAD_DIM, WIDTH, 16)
    store_rows(planes[2], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)
