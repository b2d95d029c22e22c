"""q4_t: nibbles with a scale and a minimum per row; planes qs, d, m."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.quant_formats.shared.gpu.rows import (
    affine_codes,
    in_blocks,
    load_row_scales,
    load_rows,
    nibble_columns,
    pack_nibbles,
    store_row_halves,
    store_rows,
)
from localkv.triton_primitives.unpack import fence, unpack_nibbles

PRODUCT = "fp16"
columns = nibble_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[0], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    d = load_row_scales(planes[1], first_row, valid, 2 * 15)
    m = load_row_scales(planes[2], first_row, valid, 2)
    low, high = unpack_nibbles(qs, 0, PTX)
    low, high = low * d + m, high * d + m
    if HEAD_DIM != WIDTH:  # the padding has no minimum
        is_there = (tl.arange(0, WIDTH // 2) < HEAD_DIM // 2)[None, :]
        low, high = tl.where(is_there, low, 0.0), tl.where(is_there, high, 0.0)
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    if HEAD_DIM != WIDTH:  # the padding is made a value of the row
        column = tl.arange(0, WIDTH)[None, :]
        first = tl.sum(tl.where(column == 0, x, 0.0), 1)
        x = tl.where(column < HEAD_DIM, x, first[:, None])
    d, m, codes = affine_codes(tl.reshape(x, (x.shape[0], 1, WIDTH)), 4)
    codes = in_blocks(tl.reshape(codes, (x.shape[0], WIDTH)))
    store_rows(planes[0], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)
    store_row_halves(planes[1], rows, valid, tl.reshape(d, (x.shape[0],)).to(tl.float16))
    store_row_halves(planes[2], rows, valid, tl.reshape(m, (x.shape[0],)).to(tl.float16))
