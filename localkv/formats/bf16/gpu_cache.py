"""bf16, widened by its bits and multiplied as tf32, which holds it."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.planes import halves, load_halves, store_rows
from localkv.triton_primitives.fence import fence
from localkv.triton_primitives.float_bits import decode_bf16, encode_bf16

PRODUCT = "tf32"
columns = halves


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    plane = planes[0].to(tl.pointer_type(tl.uint16))
    a, b = load_halves(plane, first_row, valid, HEAD_DIM, WIDTH)
    return fence(decode_bf16(a), PTX), fence(decode_bf16(b), PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(planes[0].to(tl.pointer_type(tl.uint16)), rows, valid, encode_bf16(x), HEAD_DIM)
