"""Five-bit integers on a GPU; planes d, m of q5_1, qh, qs.

As a weight: `qs` as in the file, a plane of fifth bits, and planes of scales and of q5_1's minima;
rows in units of 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.rows import (
    affine_codes,
    as_f16,
    as_i32,
    in_blocks,
    load_rows,
    load_scales,
    nibble_columns,
    pack_nibbles,
    repeat,
    store_rows,
    symmetric_codes,
)
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    fifth_bits,
    largest,
    load_items,
    load_runs,
    padded_blocks,
    two_parts,
    words,
)
from localkv.triton_primitives.unpack import fence, unpack_five_bits


@triton.jit
def load_five_bits(
    qs_plane,
    qh_plane,
    first_row,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    PTX: tl.constexpr,
):
    """Codes less OFFSET of the low and the high nibbles: fp16 [ROWS, WIDTH / 2] each."""
    blocks: tl.constexpr = WIDTH // 32
    qs = load_rows(qs_plane, first_row, ROWS, 0, WIDTH // 2, HEAD_DIM // 2)
    qh = load_rows(as_i32(qh_plane), first_row, ROWS, 0, blocks, HEAD_DIM // 32)
    # the four bits of four bytes in the lowest place, once for each group of four bytes
    above = qh[:, :, None] >> (tl.arange(0, 4) * 4)[None, None, :]
    above = tl.broadcast_to(above[:, :, :, None], (ROWS, blocks, 4, 4))
    above = tl.reshape(above, (ROWS, WIDTH // 2))
    lane = (tl.arange(0, WIDTH // 2) % 4)[None, :]
    return unpack_five_bits(qs, above, lane, OFFSET, PTX)


@triton.jit
def pack_fifth_bits(codes):
    """Bit 4 of code i as bit i: [rows, blocks, 32] -> int32 [rows, blocks]."""
    return tl.sum(((codes >> 4) & 1) << tl.arange(0, 32)[None, None, :], 2)


@triton.jit
def read_tile_q5_0(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    low, high = load_five_bits(
        planes[2], planes[1], first_row, valid.shape[0], HEAD_DIM, WIDTH, 16, PTX
    )
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 16)
    d = repeat(d, 16)
    return fence(low * d, PTX), fence(high * d, PTX)


@triton.jit
def write_rows_q5_0(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, codes = symmetric_codes(in_blocks(x), 5)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_i32(planes[1]), rows, valid, pack_fifth_bits(codes), HEAD_DIM // 32)
    store_rows(planes[2], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)


def planes_q5_0(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, qh, qs = (padded_blocks(field, 4) for field in fields)
    return qs.flatten(1), fifth_bits(qh, run=1), words(d.flatten(1), torch.float16)


@triton.jit
def read_q5_0(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, qh, d = planes
    n = tl.cdiv(n_values, 128)
    at = first // 128 + tl.arange(0, VALUES // 128)
    ok = at < n
    above = load_runs(qh, row, n, at, ok, EVEN)
    parts = ()
    for part in tl.static_range(0, 8, 2):
        low, high = two_parts(qs, above, row, n, at, ok, part, 16, EVEN, PTX)
        scale = load_items(d, row, 4 * n, 4 * at + part // 2, ok, EVEN).to(tl.float32)
        parts = parts + ((low, scale), (high, scale))
    return parts


@triton.jit
def read_tile_q5_1(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    low, high = load_five_bits(
        planes[3], planes[2], first_row, valid.shape[0], HEAD_DIM, WIDTH, 0, PTX
    )
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 2 * 31)
    m = load_scales(planes[1], first_row, valid, HEAD_DIM, WIDTH, 2)
    d, m = repeat(d, 16), repeat(m, 16)
    return fence(low * d + m, PTX), fence(high * d + m, PTX)


@triton.jit
def write_rows_q5_1(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_codes(in_blocks(x), 5)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_f16(planes[1]), rows, valid, m.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_i32(planes[2]), rows, valid, pack_fifth_bits(codes), HEAD_DIM // 32)
    store_rows(planes[3], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)


def planes_q5_1(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, m, qh, qs = (padded_blocks(field, 4) for field in fields)
    scales, minima = (words(field.flatten(1), torch.float16) for field in (d, m))
    return qs.flatten(1), fifth_bits(qh, run=1), scales, minima


@triton.jit
def read_q5_1(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, qh, d, m = planes
    n = tl.cdiv(n_values, 128)
    at = first // 128 + tl.arange(0, VALUES // 128)
    ok = at < n
    above = load_runs(qh, row, n, at, ok, EVEN)
    parts = ()
    for part in tl.static_range(0, 8, 2):
        low, high = two_parts(qs, above, row, n, at, ok, part, 0, EVEN, PTX)
        scale = load_items(d, row, 4 * n, 4 * at + part // 2, ok, EVEN).to(tl.float32)
        minimum = load_items(m, row, 4 * n, 4 * at + part // 2, ok, EVEN).to(tl.float32)
        parts = parts + ((low, scale, minimum), (high, scale, minimum))
    return parts


_type = partial(SimpleNamespace, PRODUCT="fp16", columns=nibble_columns)
q5_0 = _type(
    read_tile=read_tile_q5_0,
    write_rows=write_rows_q5_0,
    LAYOUT=WeightLayout(128, read_q5_0, planes_q5_0, bound=lambda p: 16 * largest(p[2])),
)
q5_1 = _type(
    read_tile=read_tile_q5_1,
    write_rows=write_rows_q5_1,
    LAYOUT=WeightLayout(
        128, read_q5_1, planes_q5_1, bound=lambda p: 31 * largest(p[2]) + largest(p[3])
    ),
)
