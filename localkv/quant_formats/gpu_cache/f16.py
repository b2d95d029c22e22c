"""f16."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.quant_formats.gpu_cache.planes import as_f16, halves, load_valid_rows, store_rows

TILE_TYPE = "fp16"
PRECISION = "tf32"
columns = halves


@triton.jit
def _half(planes, first_row, valid, FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, N: tl.constexpr):
    x = load_valid_rows(as_f16(planes[0]), first_row, valid, FIRST, N, HEAD_DIM)
    return x


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    half: tl.constexpr = WIDTH // 2
    a = _half(planes, first_row, valid, 0, HEAD_DIM, half)
    b = _half(planes, first_row, valid, half, HEAD_DIM, half)
    return a, b


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(as_f16(planes[0]), rows, valid, x.to(tl.float16), HEAD_DIM)
