"""f16."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.planes import as_f16, halves, load_halves, store_rows

PRODUCT = "fp16"
columns = halves


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    return load_halves(as_f16(planes[0]), first_row, valid, HEAD_DIM, WIDTH)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(as_f16(planes[0]), rows, valid, x.to(tl.float16), HEAD_DIM)
