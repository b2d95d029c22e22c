"""q2_1: 2-bit codes, a scale and a minimum; planes d, m, qs."""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl

from localkv.quant_formats.shared.gpu.channel_groups import (
    affine_groups,
    decode_quarters,
    store_channels,
)
from localkv.quant_formats.shared.gpu.low_bit_rows import (
    load_two_bits,
    one_after_the_other,
    pack_two_bits,
    quarter_columns,
)
from localkv.quant_formats.shared.gpu.rows import (
    affine_codes,
    as_f16,
    in_blocks,
    load_scales,
    repeat,
    store_rows,
)
from localkv.triton_primitives.unpack import fence

PRODUCT = "fp16"
columns = quarter_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    a, b, c, e = load_two_bits(planes[2], first_row, rows, HEAD_DIM, WIDTH, 1, 0, PTX)
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 2 * 3)
    m = load_scales(planes[1], first_row, valid, HEAD_DIM, WIDTH, 2)
    d, m = repeat(d, 8), repeat(m, 8)
    low = one_after_the_other(a * d + m, c * d + m)
    high = one_after_the_other(b * d + m, e * d + m)
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_codes(in_blocks(x), 2)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_f16(planes[1]), rows, valid, m.to(tl.float16), HEAD_DIM // 32)
    store_rows(planes[2], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)


@triton.jit
def read_tile_by_channel(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    quarters = load_two_bits(planes[2], first_row, rows, HEAD_DIM, WIDTH, 1, 0, PTX)
    return decode_quarters(quarters, planes, first_row, valid, HEAD_DIM, WIDTH, PTX)


@triton.jit
def write_rows_by_channel(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_groups(x, 2)
    codes = in_blocks(codes)
    store_channels(planes[0], rows, valid, d, HEAD_DIM)
    store_channels(planes[1], rows, valid, m, HEAD_DIM)

    store_rows(planes[2], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)


q2_1c = SimpleNamespace(
    PRODUCT=PRODUCT,
    columns=columns,
    read_tile=read_tile_by_channel,
    write_rows=write_rows_by_channel,
)
