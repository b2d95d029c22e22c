"""Signed bytes on a GPU; planes d, qs, and of q8_t qs, d.

As a weight: `qs` as in the file, two runs a block, and a plane of scales.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl

from localkv.quant_formats.shared.gpu.channel_groups import (
    load_channels,
    store_channels,
    symmetric_groups,
    words_of_runs,
)
from localkv.quant_formats.shared.gpu.rows import (
    as_f16,
    cut,
    halves,
    in_blocks,
    load_row_scales,
    load_rows,
    load_scales,
    repeat,
    rounded,
    scale_and_inverse,
    scale_rows,
    store_row_halves,
    store_rows,
)
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    codes_and_scales,
    largest,
    load_items,
    load_runs,
    units_from,
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


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, d = planes
    n, at, ok = units_from(first, n_values, 32, VALUES)
    scale = load_items(d, row, n, at, ok, EVEN).to(tl.float32)
    low = unpack_signed_bytes(load_runs(qs, row, 2 * n, 2 * at, ok, EVEN), PTX)
    high = unpack_signed_bytes(load_runs(qs, row, 2 * n, 2 * at + 1, ok, EVEN), PTX)
    return (low, scale), (high, scale)


LAYOUT = WeightLayout(32, read, codes_and_scales, bound=lambda p: 128 * largest(p[1]))


@triton.jit
def read_tile_by_channel(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    half: tl.constexpr = WIDTH // 2
    rows: tl.constexpr = valid.shape[0]
    a = unpack_signed_bytes(load_rows(planes[1], first_row, rows, 0, half, HEAD_DIM), PTX)
    b = unpack_signed_bytes(load_rows(planes[1], first_row, rows, half, half, HEAD_DIM), PTX)
    words = words_of_runs(WIDTH // 8, 8)
    d_a = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH)
    words += WIDTH // 8
    d_b = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH)
    return fence(a * d_a, PTX), fence(b * d_b, PTX)


@triton.jit
def write_rows_by_channel(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, codes = symmetric_groups(x, 127)
    store_channels(planes[0], rows, valid, d, HEAD_DIM)
    store_rows(planes[1], rows, valid, codes.to(tl.uint8), HEAD_DIM)


q8_0c = SimpleNamespace(
    PRODUCT=PRODUCT,
    columns=columns,
    read_tile=read_tile_by_channel,
    write_rows=write_rows_by_channel,
)


@triton.jit
def read_tile_by_token(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    half: tl.constexpr = WIDTH // 2
    rows: tl.constexpr = valid.shape[0]
    a = load_rows(planes[0], first_row, rows, 0, half, HEAD_DIM)
    b = load_rows(planes[0], first_row, rows, half, half, HEAD_DIM)
    d = load_row_scales(planes[1], first_row, valid, 127)
    return fence(unpack_signed_bytes(a, PTX) * d, PTX), fence(unpack_signed_bytes(b, PTX) * d, PTX)


@triton.jit
def write_rows_by_token(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, scaled = scale_rows(x, 127.0)
    store_rows(planes[0], rows, valid, rounded(scaled, 127).to(tl.uint8), HEAD_DIM)
    store_row_halves(planes[1], rows, valid, d)


q8_t = SimpleNamespace(
    PRODUCT="fp16", columns=halves, read_tile=read_tile_by_token, write_rows=write_rows_by_token
)
