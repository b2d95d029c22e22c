"""f32, multiplied in three products of tf32."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.planes import halves, load_halves, store_rows
from localkv.triton_primitives.fence import fence

PRODUCT = "tf32x3"
columns = halves


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    plane = planes[0].to(tl.pointer_type(tl.float32))
    a, b = load_halves(plane, first_row, valid, HEAD_DIM, WIDTH)
    return fence(a, PTX), fence(b, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(planes[0].to(tl.pointer_type(tl.float32)), rows, valid, x, HEAD_DIM)
