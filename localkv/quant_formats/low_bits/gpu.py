"""Integers of two and three bits on a GPU; planes d, m of types with minima, qh of three bits, qs.

A byte of `qs` has four codes: i, i + 16, i + 8 and i + 24, from the lowest bit on. So a word has
eight of the low half of a tile and eight of the high one. The third bits are in `qh`.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import triton
import triton.language as tl

from localkv.quant_formats.shared.gpu.channel_groups import (
    MANY_TOKENS,
    TOKENS,
    affine_groups,
    load_channels,
    store_channels,
)
from localkv.quant_formats.shared.gpu.rows import (
    F16_LIMIT,
    affine_codes,
    as_f16,
    as_i32,
    fitted_scale,
    in_blocks,
    limited_numbers,
    load_rows,
    load_scales,
    repeat,
    scale_and_inverse,
    store_rows,
    symmetric_codes,
    truncated,
    two_halves,
)
from localkv.triton_primitives.unpack import fence, unpack_three_bits, unpack_two_bits


@triton.jit
def quarter_columns(WIDTH: tl.constexpr):
    """Channels of the two halves of a tile of codes of two and three bits: of a byte's codes the
    first and the third, then the second and the fourth."""
    j = tl.arange(0, WIDTH // 2)
    byte = j % (WIDTH // 4)
    low = byte // 8 * 32 + byte % 8 + j // (WIDTH // 4) * 8
    return low, low + 16


@triton.jit
def one_after_the_other(a, b):
    """[rows, n] twice -> [rows, 2 n]."""
    pairs = tl.permute(tl.join(a, b), (0, 2, 1))
    return tl.reshape(pairs, (a.shape[0], 2 * a.shape[1]))


@triton.jit
def load_two_bits(
    qs_plane,
    first_row,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    OFFSET: tl.constexpr,
    PTX: tl.constexpr,
):
    """STEP (1 or 2) times the four codes of each byte, from the lowest bit on, less OFFSET: fp16
    [ROWS, WIDTH / 4] each."""
    qs = load_rows(qs_plane, first_row, ROWS, 0, WIDTH // 4, HEAD_DIM // 4)
    return unpack_two_bits(qs, STEP, OFFSET, PTX)


@triton.jit
def load_three_bits(
    qs_plane,
    qh_plane,
    first_row,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    PTX: tl.constexpr,
):
    """Codes with a third bit, as `load_two_bits` loads two."""
    qs = load_rows(qs_plane, first_row, ROWS, 0, WIDTH // 4, HEAD_DIM // 4)
    thirds, lane = load_third_bits(qh_plane, first_row, ROWS, HEAD_DIM, WIDTH)
    return unpack_three_bits(qs, thirds, lane, OFFSET, PTX)


@triton.jit
def symmetric_quarters(
    quarters, planes, first_row, valid,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The two halves of a tile of codes times the scales of blocks in the first plane."""
    a, b, c, e = quarters
    d = repeat(load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, LARGEST), 8)
    low, high = one_after_the_other(a * d, c * d), one_after_the_other(b * d, e * d)
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def affine_quarters(
    quarters, planes, first_row, valid,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, LAST: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The two halves of a tile; scales and minima of blocks are in the first two planes."""
    a, b, c, e = quarters
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 2 * LAST)
    m = load_scales(planes[1], first_row, valid, HEAD_DIM, WIDTH, 2)
    d, m = repeat(d, 8), repeat(m, 8)
    low = one_after_the_other(a * d + m, c * d + m)
    high = one_after_the_other(b * d + m, e * d + m)
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def words_of_quarters(n_words):
    """Words of a half of a tile of codes of two and three bits (`quarter_columns`)."""
    quarter: tl.constexpr = n_words // 2
    w = tl.arange(0, n_words)
    return w % quarter // 2 * 8 + w // quarter * 2 + w % 2


@triton.jit
def quarters_by_channel(
    quarters, planes, first_row, valid,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr, GROUP: tl.constexpr = TOKENS,
):  # fmt: skip
    """The two halves of a tile; scales and minima of channels are in the first two planes."""
    a, b, c, e = quarters
    words = words_of_quarters(WIDTH // 8)
    d = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH, GROUP)
    m = load_channels(planes[1], first_row, valid, words, HEAD_DIM, WIDTH, GROUP)
    low = one_after_the_other(a, c) * d + m
    words += 4
    d = load_channels(planes[0], first_row, valid, words, HEAD_DIM, WIDTH, GROUP)
    m = load_channels(planes[1], first_row, valid, words, HEAD_DIM, WIDTH, GROUP)
    return fence(low, PTX), fence(one_after_the_other(b, e) * d + m, PTX)


@triton.jit
def swap_bits(x, DISTANCE: tl.constexpr, LOWER: tl.constexpr):
    """int32 x with the bits LOWER exchanged with the bits DISTANCE places above."""
    changed = (x ^ (x >> DISTANCE)) & LOWER
    return x ^ changed ^ (changed << DISTANCE)


@triton.jit
def beside_two_bits(qh):
    """Move bits of 32 codes, in their order, int32, to where a word of `qs` has its codes.

    These are twice as many as a word of `qs` has codes. For the first word a code's bit goes to the
    lower place of its two bits there, for the second word to the upper one.

    A bit's place has five bits itself: two say which code of a byte it is, one which word, two
    which byte of it. Each step exchanges two of them.
    """
    x = swap_bits(qh, 14, 0x0000CCCC)
    x = swap_bits(x, 7, 0x00AA00AA)
    return swap_bits(x, 3, 0x0A0A0A0A)


@triton.jit
def load_third_bits(
    qh_plane, first_row, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Third bits and lanes of bytes of codes as `unpack_three_bits` takes them."""
    blocks: tl.constexpr = WIDTH // 32
    qh = load_rows(as_i32(qh_plane), first_row, ROWS, 0, blocks, HEAD_DIM // 32)
    thirds = beside_two_bits(qh)[:, :, None] >> tl.arange(0, 2)[None, None, :]
    thirds = tl.broadcast_to((thirds & 0x55555555)[:, :, :, None], (ROWS, blocks, 2, 4))
    lane = (tl.arange(0, WIDTH // 4) % 4)[None, :]
    return tl.reshape(thirds, (ROWS, WIDTH // 4)), lane


@triton.jit
def pack_two_bits(codes):
    """The low two bits of codes: [rows, blocks, 32] -> uint8 [rows, bytes]."""
    low, high = two_halves(codes & 3)
    low, high = two_halves(low | (high << 2))
    return tl.reshape(low | (high << 4), (codes.shape[0], codes.shape[1] * 8)).to(tl.uint8)


@triton.jit
def pack_third_bits(codes):
    """Bit 2 of code i as bit i: [rows, blocks, 32] -> int32 [rows, blocks]."""
    return tl.sum(((codes >> 2) & 1) << tl.arange(0, 32)[None, None, :], 2)


@triton.jit
def read_tile_kv3_1(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    quarters = load_three_bits(planes[3], planes[2], first_row, rows, HEAD_DIM, WIDTH, 0, PTX)
    return affine_quarters(quarters, planes, first_row, valid, HEAD_DIM, WIDTH, 7, PTX)


@triton.jit
def write_rows_kv3_1(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_codes(in_blocks(x), 3)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_f16(planes[1]), rows, valid, m.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_i32(planes[2]), rows, valid, pack_third_bits(codes), HEAD_DIM // 32)
    store_rows(planes[3], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)


@triton.jit
def read_tile_kv3_1c(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    quarters = load_three_bits(planes[3], planes[2], first_row, rows, HEAD_DIM, WIDTH, 0, PTX)
    return quarters_by_channel(quarters, planes, first_row, valid, HEAD_DIM, WIDTH, PTX)


@triton.jit
def write_rows_kv3_1c(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_groups(x, 3)
    codes = in_blocks(codes)
    store_channels(planes[0], rows, valid, d, HEAD_DIM)
    store_channels(planes[1], rows, valid, m, HEAD_DIM)
    store_rows(as_i32(planes[2]), rows, valid, pack_third_bits(codes), HEAD_DIM // 32)
    store_rows(planes[3], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)


@triton.jit
def read_tile_kv3_1c128(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    quarters = load_three_bits(planes[3], planes[2], first_row, rows, HEAD_DIM, WIDTH, 0, PTX)
    return quarters_by_channel(
        quarters, planes, first_row, valid, HEAD_DIM, WIDTH, PTX, MANY_TOKENS
    )


@triton.jit
def read_tile_kv3_0(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    quarters = load_three_bits(planes[2], planes[1], first_row, rows, HEAD_DIM, WIDTH, 4, PTX)
    return symmetric_quarters(quarters, planes, first_row, valid, HEAD_DIM, WIDTH, 4, PTX)


@triton.jit
def write_rows_kv3_0(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    x = limited_numbers(in_blocks(x), 4 * F16_LIMIT)
    d, codes = symmetric_codes(x, 3)
    q = codes.to(tl.float32) - 4.0
    d = fitted_scale(x * q, q * q, d)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_i32(planes[1]), rows, valid, pack_third_bits(codes), HEAD_DIM // 32)
    store_rows(planes[2], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)


@triton.jit
def read_tile_kv2_1(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    quarters = load_two_bits(planes[2], first_row, rows, HEAD_DIM, WIDTH, 1, 0, PTX)
    return affine_quarters(quarters, planes, first_row, valid, HEAD_DIM, WIDTH, 3, PTX)


@triton.jit
def write_rows_kv2_1(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_codes(in_blocks(x), 2)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_f16(planes[1]), rows, valid, m.to(tl.float16), HEAD_DIM // 32)
    store_rows(planes[2], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)


@triton.jit
def read_tile_kv2_1c(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    quarters = load_two_bits(planes[2], first_row, rows, HEAD_DIM, WIDTH, 1, 0, PTX)
    return quarters_by_channel(quarters, planes, first_row, valid, HEAD_DIM, WIDTH, PTX)


@triton.jit
def write_rows_kv2_1c(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_groups(x, 2)
    codes = in_blocks(codes)
    store_channels(planes[0], rows, valid, d, HEAD_DIM)
    store_channels(planes[1], rows, valid, m, HEAD_DIM)
    store_rows(planes[2], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)


@triton.jit
def read_tile_kv2_0(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    quarters = load_two_bits(planes[1], first_row, rows, HEAD_DIM, WIDTH, 2, 3, PTX)
    return symmetric_quarters(quarters, planes, first_row, valid, HEAD_DIM, WIDTH, 3, PTX)


@triton.jit
def write_rows_kv2_0(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    x = limited_numbers(in_blocks(x), 3 * F16_LIMIT)
    is_nan = x != x
    has_nan = tl.max(is_nan.to(tl.int32), 2) > 0
    d, inverse = scale_and_inverse(tl.max(tl.where(is_nan, 0.0, tl.abs(x)), 2), has_nan, 4.5)
    codes = truncated(x * inverse[:, :, None] * 0.5 + 2.0, 0, 3)
    q = codes.to(tl.float32) * 2.0 - 3.0
    d = fitted_scale(x * q, q * q, d)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(planes[1], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)


_type = partial(SimpleNamespace, PRODUCT="fp16", columns=quarter_columns)
kv2_0 = _type(read_tile=read_tile_kv2_0, write_rows=write_rows_kv2_0)
kv2_1c = _type(read_tile=read_tile_kv2_1c, write_rows=write_rows_kv2_1c)
kv2_1 = _type(read_tile=read_tile_kv2_1, write_rows=write_rows_kv2_1)
kv3_0 = _type(read_tile=read_tile_kv3_0, write_rows=write_rows_kv3_0)
kv3_1c = _type(read_tile=read_tile_kv3_1c, write_rows=write_rows_kv3_1c)
kv3_1c128 = _type(read_tile=read_tile_kv3_1c128, write_rows=write_rows_kv3_1c)
kv3_1 = _type(read_tile=read_tile_kv3_1, write_rows=write_rows_kv3_1)
