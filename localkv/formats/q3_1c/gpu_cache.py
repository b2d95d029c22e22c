"""q3_1c: three bits, scales and minima by channel; planes d, m, qh, qs."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.channel_groups import (
    affine_groups,
    decode_quarters,
    store_channels,
)
from localkv.formats.gpu.low_bit_rows import (
    load_three_bits,
    pack_third_bits,
    pack_two_bits,
    quarter_columns,
)
from localkv.formats.gpu.planes import as_i32, store_rows
from localkv.formats.gpu.rounding import in_blocks

PRODUCT = "fp16"
columns = quarter_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    quarters = load_three_bits(planes[3], planes[2], first_row, rows, HEAD_DIM, WIDTH, 0, PTX)
    return decode_quarters(quarters, planes, first_row, valid, HEAD_DIM, WIDTH, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_groups(x, 3)
    codes = in_blocks(codes)
    store_channels(planes[0], rows, valid, d, HEAD_DIM)
    store_channels(planes[1], rows, valid, m, HEAD_DIM)
    store_rows(as_i32(planes[2]), rows, valid, pack_third_bits(codes), HEAD_DIM // 32)
    store_rows(planes[3], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)
