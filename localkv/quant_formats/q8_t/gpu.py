"""q8_t: signed bytes with a scale per row; planes qs, d."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.quant_formats.shared.gpu.rows import (
    halves,
    load_row_scales,
    load_rows,
    rounded,
    scale_rows,
    store_row_halves,
    store_rows,
)
from localkv.triton_primitives.unpack import fence, unpack_signed_bytes

PRODUCT = "fp16"
columns = halves


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    half: tl.constexpr = WIDTH // 2
    rows: tl.constexpr = valid.shape[0]
    a = load_rows(planes[0], first_row, rows, 0, half, HEAD_DIM)
    b = load_rows(planes[0], first_row, rows, half, half, HEAD_DIM)
    d = load_row_scales(planes[1], first_row, valid, 127)
    return fence(unpack_signed_bytes(a, PTX) * d, PTX), fence(unpack_signed_bytes(b, PTX) * d, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, scaled = scale_rows(x, 127.0)
    store_rows(planes[0], rows, valid, rounded(scaled, 127).to(tl.uint8), HEAD_DIM)
    store_row_halves(planes[1], rows, valid, d)
