"""f32, multiplied in three products of tf32."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.quant_formats.gpu_cache.planes import halves, load_valid_rows, store_rows
from localkv.triton_primitives.fence import fence

PRODUCT = "tf32x3"
columns = halves


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    half: tl.constexpr = WIDTH // 2
    plane = planes[0].to(tl.pointer_type(tl.float32))
    a = load_valid_rows(plane, first_row, valid, 0, half, HEAD_DIM)
    b = load_valid_rows(plane, first_row, valid, half, half, HEAD_DIM)
    return fence(a, PTX), fence(b, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(planes[0].to(tl.pointer_type(tl.float32)), rows, valid, x, HEAD_DIM)
