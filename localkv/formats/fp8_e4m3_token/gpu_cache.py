"""fp8_e4m3 with a scale per row; planes values, d."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.planes import halves, load_halves, store_rows
from localkv.formats.gpu.row_scale import (
    load_row_scales,
    scale_rows,
    store_row_halves,
)
from localkv.triton_primitives.fence import fence
from localkv.triton_primitives.float_bits import decode_e4m3, encode_e4m3

PRODUCT = "fp16"
columns = halves


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    a, b = load_halves(planes[0], first_row, valid, HEAD_DIM, WIDTH)
    d = load_row_scales(planes[1], first_row, valid, 448)
    return fence(decode_e4m3(a, PTX) * d, PTX), fence(decode_e4m3(b, PTX) * d, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, scaled = scale_rows(x, 448.0)
    store_rows(planes[0], rows, valid, encode_e4m3(scaled), HEAD_DIM)
    store_row_halves(planes[1], rows, valid, d)
