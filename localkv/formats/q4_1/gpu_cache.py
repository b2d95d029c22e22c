"""q4_1: nibbles, a scale and a minimum; planes d, m, qs."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.planes import (
    as_f16,
    load_rows,
    load_scales,
    nibble_columns,
    repeat,
    store_rows,
)
from localkv.formats.gpu.rounding import affine_codes, in_blocks, pack_nibbles
from localkv.triton_primitives.fence import fence
from localkv.triton_primitives.unpack import unpack_nibbles

PRODUCT = "fp16"
columns = nibble_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[2], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 2 * 15)
    m = load_scales(planes[1], first_row, valid, HEAD_DIM, WIDTH, 2)
    low, high = unpack_nibbles(qs, 0, PTX)
    d, m = repeat(d, 16), repeat(m, 16)
    return fence(low * d + m, PTX), fence(high * d + m, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_codes(in_blocks(x), 4)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_f16(planes[1]), rows, valid, m.to(tl.float16), HEAD_DIM // 32)
    store_rows(planes[2], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)
