"""q4_1: nibbles, a scale and a minimum; planes d, m, qs.

As a weight: `qs` as in the file, 16 bytes a block, a plane of scales and one of minima.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.channel_groups import (
    affine_groups,
    load_channels,
    store_channels,
    words_of_runs,
)
from localkv.quant_formats.shared.gpu.rows import (
    affine_codes,
    as_f16,
    in_blocks,
    load_rows,
    load_scales,
    nibble_columns,
    pack_nibbles,
    repeat,
    store_rows,
)
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    largest,
    load_items,
    load_runs,
    words,
)
from localkv.triton_primitives.unpack import fence, unpack_nibbles

PRODUCT = "fp16"
columns = nibble_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[2], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 2 * 15)
    m = load_scales(planes[1], first_row, valid, HEAD_DIM, WIDTH, 2)
    low, high = unpack_nibbles(qs, 0, PTX)
    d, m = repeat(d, 16), repeat(m, 16)
    return fence(low * d + m, PTX), fence(high * d + m, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_codes(in_blocks(x), 4)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_f16(planes[1]), rows, valid, m.to(tl.float16), HEAD_DIM // 32)
    store_rows(planes[2], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, m, qs = fields
    scales, minima = (words(field.flatten(1), torch.float16) for field in (d, m))
    return qs.flatten(1).contiguous(), scales, minima


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, d, m = planes
    n = n_values // 32
    at = first // 32 + tl.arange(0, VALUES // 32)
    ok = at < n
    low, high = unpack_nibbles(load_runs(qs, row, n, at, ok, EVEN), 0, PTX)
    scale = load_items(d, row, n, at, ok, EVEN).to(tl.float32)
    minimum = load_items(m, row, n, at, ok, EVEN).to(tl.float32)
    return (low, scale, minimum), (high, scale, minimum)


LAYOUT = WeightLayout(32, read, planes, bound=lambda p: 15 * largest(p[1]) + largest(p[2]))


@triton.jit
def read_tile_by_channel(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[2], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    low, high = unpack_nibbles(qs, 0, PTX)
    words = words_of_runs(WIDTH // 8, 4)
    d = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH)
    m = load_channels(planes[1], first_row, valid, words, HEAD_DIM, WIDTH)
    low = low * d + m
    words += 4
    d = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH)
    m = load_channels(planes[1], first_row, valid, words, HEAD_DIM, WIDTH)
    return fence(low, PTX), fence(high * d + m, PTX)


@triton.jit
def write_rows_by_channel(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_groups(x, 4)
    store_channels(planes[0], rows, valid, d, HEAD_DIM)
    store_channels(planes[1], rows, valid, m, HEAD_DIM)
    store_rows(planes[2], rows, valid, pack_nibbles(in_blocks(codes)), HEAD_DIM // 2)


q4_1c = SimpleNamespace(
    PRODUCT=PRODUCT,
    columns=columns,
    read_tile=read_tile_by_channel,
    write_rows=write_rows_by_channel,
)
