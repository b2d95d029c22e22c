"""Four-bit integers on a GPU; planes d, m of types with minima, qs, and of q4_t qs, d, m.

As a weight: `qs` as in the file, 16 bytes a block, a plane of scales and one of minima.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.channel_groups import (
    MANY_TOKENS,
    TOKENS,
    affine_groups,
    load_channels,
    store_channels,
    words_of_runs,
)
from localkv.quant_formats.shared.gpu.rows import (
    affine_codes,
    as_f16,
    in_blocks,
    load_row_scales,
    load_rows,
    load_scales,
    nibble_columns,
    pack_nibbles,
    repeat,
    store_row_halves,
    store_rows,
    symmetric_codes,
)
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    codes_and_scales,
    largest,
    load_items,
    load_runs,
    units_from,
    words,
)
from localkv.triton_primitives.unpack import fence, unpack_nibbles


@triton.jit
def read_tile_q4_0(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[1], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 8)
    low, high = unpack_nibbles(qs, 8, PTX)
    d = repeat(d, 16)
    return fence(low * d, PTX), fence(high * d, PTX)


@triton.jit
def write_rows_q4_0(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, codes = symmetric_codes(in_blocks(x), 4)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(planes[1], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)


@triton.jit
def read_q4_0(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, d = planes
    n, at, ok = units_from(first, n_values, 32, VALUES)
    low, high = unpack_nibbles(load_runs(qs, row, n, at, ok, EVEN), 8, PTX)
    scale = load_items(d, row, n, at, ok, EVEN).to(tl.float32)
    return (low, scale), (high, scale)


@triton.jit
def read_tile_q4_1(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[2], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 2 * 15)
    m = load_scales(planes[1], first_row, valid, HEAD_DIM, WIDTH, 2)
    low, high = unpack_nibbles(qs, 0, PTX)
    d, m = repeat(d, 16), repeat(m, 16)
    return fence(low * d + m, PTX), fence(high * d + m, PTX)


@triton.jit
def write_rows_q4_1(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_codes(in_blocks(x), 4)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_f16(planes[1]), rows, valid, m.to(tl.float16), HEAD_DIM // 32)
    store_rows(planes[2], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)


def planes_q4_1(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, m, qs = fields
    scales, minima = (words(field.flatten(1), torch.float16) for field in (d, m))
    return qs.flatten(1).contiguous(), scales, minima


@triton.jit
def read_q4_1(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, d, m = planes
    n, at, ok = units_from(first, n_values, 32, VALUES)
    low, high = unpack_nibbles(load_runs(qs, row, n, at, ok, EVEN), 0, PTX)
    scale = load_items(d, row, n, at, ok, EVEN).to(tl.float32)
    minimum = load_items(m, row, n, at, ok, EVEN).to(tl.float32)
    return (low, scale, minimum), (high, scale, minimum)


@triton.jit
def nibbles_by_channel(
    planes, first_row, valid,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    qs = load_rows(planes[2], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    low, high = unpack_nibbles(qs, 0, PTX)
    words = words_of_runs(WIDTH // 8, 4)
    d = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH, GROUP)
    m = load_channels(planes[1], first_row, valid, words, HEAD_DIM, WIDTH, GROUP)
    low = low * d + m
    words += 4
    d = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH, GROUP)
    m = load_channels(planes[1], first_row, valid, words, HEAD_DIM, WIDTH, GROUP)
    return fence(low, PTX), fence(high * d + m, PTX)


@triton.jit
def read_tile_q4_1c(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    return nibbles_by_channel(planes, first_row, valid, HEAD_DIM, WIDTH, PTX, TOKENS)


@triton.jit
def read_tile_q4_1c128(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    return nibbles_by_channel(planes, first_row, valid, HEAD_DIM, WIDTH, PTX, MANY_TOKENS)


@triton.jit
def write_rows_q4_1c(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_groups(x, 4)
    store_channels(planes[0], rows, valid, d, HEAD_DIM)
    store_channels(planes[1], rows, valid, m, HEAD_DIM)
    store_rows(planes[2], rows, valid, pack_nibbles(in_blocks(codes)), HEAD_DIM // 2)


@triton.jit
def read_tile_q4_t(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[0], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    d = load_row_scales(planes[1], first_row, valid, 2 * 15)
    m = load_row_scales(planes[2], first_row, valid, 2)
    low, high = unpack_nibbles(qs, 0, PTX)
    low, high = low * d + m, high * d + m
    if HEAD_DIM != WIDTH:  # the padding has no minimum
        is_there = (tl.arange(0, WIDTH // 2) < HEAD_DIM // 2)[None, :]
        low, high = tl.where(is_there, low, 0.0), tl.where(is_there, high, 0.0)
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows_q4_t(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    if HEAD_DIM != WIDTH:  # the padding is made a value of the row
        column = tl.arange(0, WIDTH)[None, :]
        first = tl.sum(tl.where(column == 0, x, 0.0), 1)
        x = tl.where(column < HEAD_DIM, x, first[:, None])
    d, m, codes = affine_codes(tl.reshape(x, (x.shape[0], 1, WIDTH)), 4)
    codes = in_blocks(tl.reshape(codes, (x.shape[0], WIDTH)))
    store_rows(planes[0], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)
    store_row_halves(planes[1], rows, valid, tl.reshape(d, (x.shape[0],)).to(tl.float16))
    store_row_halves(planes[2], rows, valid, tl.reshape(m, (x.shape[0],)).to(tl.float16))


_type = partial(SimpleNamespace, PRODUCT="fp16", columns=nibble_columns)
q4_0 = _type(
    read_tile=read_tile_q4_0,
    write_rows=write_rows_q4_0,
    LAYOUT=WeightLayout(32, read_q4_0, codes_and_scales, bound=lambda p: 8 * largest(p[1])),
)
q4_1c = _type(read_tile=read_tile_q4_1c, write_rows=write_rows_q4_1c)
q4_1c128 = _type(read_tile=read_tile_q4_1c128, write_rows=write_rows_q4_1c)
q4_1 = _type(
    read_tile=read_tile_q4_1,
    write_rows=write_rows_q4_1,
    LAYOUT=WeightLayout(
        32, read_q4_1, planes_q4_1, bound=lambda p: 15 * largest(p[1]) + largest(p[2])
    ),
)
q4_t = _type(read_tile=read_tile_q4_t, write_rows=write_rows_q4_t)
