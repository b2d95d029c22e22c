"""fp8_e5m2, rebuilt as fp16 from its bits, which every GPU can do."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.planes import halves, load_halves, store_rows
from localkv.triton_primitives.fence import fence
from localkv.triton_primitives.float_bits import decode_e5m2, encode_e5m2

PRODUCT = "fp16"
columns = halves


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    a, b = load_halves(planes[0], first_row, valid, HEAD_DIM, WIDTH)
    return fence(decode_e5m2(a, PTX), PTX), fence(decode_e5m2(b, PTX), PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(planes[0], rows, valid, encode_e5m2(x), HEAD_DIM)
