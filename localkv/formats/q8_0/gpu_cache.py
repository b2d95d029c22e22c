"""q8_0: signed bytes and a scale; planes d, qs."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.gpu.planes import (
    as_f16,
    cut,
    halves,
    load_rows,
    load_scales,
    repeat,
    store_rows,
)
from localkv.formats.gpu.rounding import in_blocks, rounded, scale_and_inverse
from localkv.triton_primitives.fence import fence
from localkv.triton_primitives.unpack import unpack_signed_bytes

PRODUCT = "fp16"
columns = halves


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    half: tl.constexpr = WIDTH // 2
    rows: tl.constexpr = valid.shape[0]
    a = load_rows(planes[1], first_row, rows, 0, half, HEAD_DIM)
    b = load_rows(planes[1], first_row, rows, half, half, HEAD_DIM)
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 127)
    d_a, d_b = cut(d)
    a = unpack_signed_bytes(a, PTX) * repeat(d_a, 32)
    b = unpack_signed_bytes(b, PTX) * repeat(d_b, 32)
    return fence(a, PTX), fence(b, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    x = in_blocks(x)
    is_nan = x != x
    largest = tl.max(tl.where(is_nan, 0.0, tl.abs(x)), 2)
    d, inverse = scale_and_inverse(largest, tl.max(is_nan.to(tl.int32), 2) > 0, 127.0)
    codes = rounded(x * inverse[:, :, None], 127).to(tl.uint8)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(planes[1], rows, valid, tl.reshape(codes, (x.shape[0], WIDTH)), HEAD_DIM)
