"""q2_1c: two bits, scales and minima by channel; planes d, m, qs."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.channel_groups import (
    affine_groups,
    load_channels,
    store_channels,
    words_of_runs,
)
from localkv.formats.gpu.low_bit_rows import (
    load_two_bits,
    one_after_the_other,
    pack_two_bits,
    quarter_columns,
)
from localkv.formats.gpu.planes import store_rows
from localkv.formats.gpu.rounding import in_blocks
from localkv.triton_primitives.fence import fence

PRODUCT = "fp16"
columns = quarter_columns


@triton.jit
def scaled(
    x, planes, first_row, valid,
    FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes of channels FIRST to FIRST + 7 of each block, decoded."""
    words = words_of_runs(WIDTH // 16, 2) + FIRST // 4
    d = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH)
    m = load_channels(planes[1], first_row, valid, words, HEAD_DIM, WIDTH)
    return x * d + m


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    a, b, c, e = load_two_bits(planes[2], first_row, rows, HEAD_DIM, WIDTH, 1, 0, PTX)
    a = scaled(a, planes, first_row, valid, 0, HEAD_DIM, WIDTH)
    b = scaled(b, planes, first_row, valid, 16, HEAD_DIM, WIDTH)
    c = scaled(c, planes, first_row, valid, 8, HEAD_DIM, WIDTH)
    e = scaled(e, planes, first_row, valid, 24, HEAD_DIM, WIDTH)
    return fence(one_after_the_other(a, c), PTX), fence(one_after_the_other(b, e), PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_groups(x, 2)
    codes = in_blocks(codes)
    store_channels(planes[0], rows, valid, d, HEAD_DIM)
    store_channels(planes[1], rows, valid, m, HEAD_DIM)

    store_rows(planes[2], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)
