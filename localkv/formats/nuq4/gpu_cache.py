"""nuq4: nibbles that select from a codebook; planes d, o, qs, and the codebook."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.codebook_rows import look_up, scaled_with_outliers, write_codes
from localkv.formats.gpu.planes import load_rows, nibble_columns, store_rows
from localkv.formats.gpu.rounding import pack_nibbles
from localkv.triton_primitives.fence import fence

PRODUCT = "fp16"
columns = nibble_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[2], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    low, high = look_up(planes[3], qs & 15), look_up(planes[3], qs >> 4)
    low, high = scaled_with_outliers(
        low, high, nibble_columns(WIDTH), planes, first_row, valid, HEAD_DIM, WIDTH, False
    )
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    codes = write_codes(planes, rows, valid, x, HEAD_DIM, WIDTH, 16)
    store_rows(planes[2], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)
