"""8-bit floats, rebuilt as fp16 from their bits, which every GPU can do. Planes values and, with a
scale per row, d.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl

from localkv.quant_formats.shared.gpu.rows import (
    halves,
    load_halves,
    load_row_scales,
    scale_rows,
    store_row_halves,
    store_rows,
)
from localkv.triton_primitives.float_bits import decode_e4m3, decode_e5m2, encode_e4m3, encode_e5m2
from localkv.triton_primitives.unpack import fence


@triton.jit
def read_e4m3(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    a, b = load_halves(planes[0], first_row, valid, HEAD_DIM, WIDTH)
    return fence(decode_e4m3(a, PTX), PTX), fence(decode_e4m3(b, PTX), PTX)


@triton.jit
def codes_e4m3(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    """Rows as they are, for products of "e4m3"."""
    a, b = load_halves(planes[0], first_row, valid, HEAD_DIM, WIDTH)
    return a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)


@triton.jit
def write_e4m3(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(planes[0], rows, valid, encode_e4m3(x), HEAD_DIM)


@triton.jit
def read_scaled_e4m3(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    a, b = load_halves(planes[0], first_row, valid, HEAD_DIM, WIDTH)
    d = load_row_scales(planes[1], first_row, valid, 448)
    return fence(decode_e4m3(a, PTX) * d, PTX), fence(decode_e4m3(b, PTX) * d, PTX)


@triton.jit
def write_scaled_e4m3(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, scaled = scale_rows(x, 448.0)
    store_rows(planes[0], rows, valid, encode_e4m3(scaled), HEAD_DIM)
    store_row_halves(planes[1], rows, valid, d)


@triton.jit
def read_e5m2(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    a, b = load_halves(planes[0], first_row, valid, HEAD_DIM, WIDTH)
    return fence(decode_e5m2(a, PTX), PTX), fence(decode_e5m2(b, PTX), PTX)


@triton.jit
def write_e5m2(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(planes[0], rows, valid, encode_e5m2(x), HEAD_DIM)


@triton.jit
def read_scaled_e5m2(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    a, b = load_halves(planes[0], first_row, valid, HEAD_DIM, WIDTH)
    d = load_row_scales(planes[1], first_row, valid, 57344)
    return fence(decode_e5m2(a, PTX) * d, PTX), fence(decode_e5m2(b, PTX) * d, PTX)


@triton.jit
def write_scaled_e5m2(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, scaled = scale_rows(x, 57344.0)
    store_rows(planes[0], rows, valid, encode_e5m2(scaled), HEAD_DIM)
    store_row_halves(planes[1], rows, valid, d)


fp8_e4m3 = SimpleNamespace(
    PRODUCT="fp16",
    columns=halves,
    read_tile=read_e4m3,
    write_rows=write_e4m3,
    read_codes=codes_e4m3,
)
fp8_e5m2 = SimpleNamespace(
    PRODUCT="fp16", columns=halves, read_tile=read_e5m2, write_rows=write_e5m2
)
fp8_e4m3_token = SimpleNamespace(
    PRODUCT="fp16", columns=halves, read_tile=read_scaled_e4m3, write_rows=write_scaled_e4m3
)
fp8_e5m2_token = SimpleNamespace(
    PRODUCT="fp16", columns=halves, read_tile=read_scaled_e5m2, write_rows=write_scaled_e5m2
)
