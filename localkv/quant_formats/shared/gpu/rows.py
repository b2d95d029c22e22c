"""Rows of a cache's planes: how types load, round, pack and store them, and the order of channels.

Rounding is the reference's (`shared/rounding.py`), bit for bit but for the payload of a NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.quant_formats.shared.rounding import F16_LIMIT as LIMIT
from localkv.triton_primitives.float_bits import F16_MAX, largest_scale, saturate


@triton.jit
def halves(WIDTH: tl.constexpr):
    """Channels of a tile that is cut in the middle."""
    j = tl.arange(0, WIDTH // 2)
    return j, j + WIDTH // 2


@triton.jit
def nibble_columns(WIDTH: tl.constexpr):
    """Channels of the low and of the high nibbles of rows in blocks of 32."""
    j = tl.arange(0, WIDTH // 2)
    low = j // 16 * 32 + j % 16
    return low, low + 16


@triton.jit
def load_rows(plane, first_row, ROWS: tl.constexpr, FIRST, N: tl.constexpr, LENGTH: tl.constexpr):
    """Items FIRST to FIRST + N (a constant) of ROWS rows of LENGTH items: [ROWS, N].

    `plane` is a pointer to items of the type wanted; beyond a row's end are zeros.
    """
    n = tl.arange(0, ROWS)
    j = FIRST + tl.arange(0, N)
    pointers = plane + first_row * LENGTH + (n[:, None] * LENGTH + j[None, :])
    if FIRST + N > LENGTH:
        return tl.load(pointers, mask=(j < LENGTH)[None, :], other=0)
    else:
        return tl.load(pointers)


@triton.jit
def load_valid_rows(plane, first_row, valid, FIRST, N: tl.constexpr, LENGTH: tl.constexpr):
    """Rows as `load_rows` loads them, but zeros where they aren't `valid` (bool [rows])."""
    n = tl.arange(0, valid.shape[0])
    j = FIRST + tl.arange(0, N)
    pointers = plane + first_row * LENGTH + (n[:, None] * LENGTH + j[None, :])
    mask = valid[:, None]
    if FIRST + N > LENGTH:
        mask = mask & (j < LENGTH)[None, :]
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def load_halves(plane, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of HEAD_DIM items, zeros where not `valid`, as two halves: [rows, WIDTH / 2] each."""
    half: tl.constexpr = WIDTH // 2
    left = load_valid_rows(plane, first_row, valid, 0, half, HEAD_DIM)
    return left, load_valid_rows(plane, first_row, valid, half, half, HEAD_DIM)


@triton.jit
def as_f16(plane):
    """A plane of fp16 numbers."""
    return plane.to(tl.pointer_type(tl.float16))


@triton.jit
def load_scales(
    plane, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr
):
    """A fp16 number per block of 32, 0 in rows that aren't `valid`: [rows, WIDTH / 32].

    Numbers are limited to what times LARGEST is finite in fp16: a block of larger values, which
    the codes can hold, shrinks to fp16's range instead of becoming infinite.

    Where a row has whole words, they are loaded as words of 2 or 4 of them. With more threads than
    numbers each would load 2 bytes, and so little isn't copied to shared memory in the background.
    """
    blocks: tl.constexpr = WIDTH // 32
    if HEAD_DIM == WIDTH:
        rows: tl.constexpr = valid.shape[0]
        per_word: tl.constexpr = 2 if blocks == 2 else 4
        words = plane.to(tl.pointer_type(tl.int32 if blocks == 2 else tl.int64))
        length: tl.constexpr = blocks // per_word
        word = load_valid_rows(words, first_row, valid, 0, length, length)
        shifts = (16 * tl.arange(0, per_word)).to(word.dtype)
        bits = (word[:, :, None] >> shifts[None, None, :]).to(tl.uint16)
        scales = tl.reshape(bits.to(tl.float16, bitcast=True), (rows, blocks))
    else:
        scales = load_valid_rows(as_f16(plane), first_row, valid, 0, blocks, HEAD_DIM // 32)
    return saturate(scales, largest_scale(LARGEST))


@triton.jit
def as_i32(plane):
    """A plane of words."""
    return plane.to(tl.pointer_type(tl.int32))


@triton.jit
def repeat(x, TIMES: tl.constexpr):
    """Each item of x [rows, n] as often one after the other: [rows, n * TIMES]."""
    spread = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], TIMES))
    return tl.reshape(spread, (x.shape[0], x.shape[1] * TIMES))


@triton.jit
def cut(x):
    """The left and the right half of x [rows, n]."""
    pairs = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def store_rows(plane, rows, valid, x, LENGTH: tl.constexpr):
    """The first LENGTH items of x [rows, n], whose type is the plane's."""
    j = tl.arange(0, x.shape[1])
    mask = valid[:, None] & (j < LENGTH)[None, :]
    tl.store(plane + rows[:, None] * LENGTH + j[None, :], x, mask=mask)


F16_LIMIT = tl.constexpr(LIMIT)
F32_LARGEST = tl.constexpr(3.4028234663852886e38)
BELOW_HALF = tl.constexpr(0.5 - 2**-25)
SMALLEST = tl.constexpr(2.0**-24)
"""The smallest positive fp16 number."""
NAN = tl.constexpr(float("nan"))


@triton.jit
def in_blocks(x):
    """[rows, WIDTH] -> [rows, WIDTH / 32, 32]."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // 32, 32))


@triton.jit
def limited(x, LIMIT: tl.constexpr):
    """`x` within +-LIMIT; a NaN becomes -LIMIT or LIMIT."""
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def limited_numbers(x, LIMIT: tl.constexpr):
    """`x` within +-LIMIT; a NaN stays one."""
    return tl.where(x == x, limited(x, LIMIT), x)


@triton.jit
def scale_and_inverse(extreme, has_nan, STEPS: tl.constexpr):
    """`extreme / STEPS` within fp16's range, and the factor that turns values into codes."""
    d = limited(tl.div_rn(extreme, STEPS), F16_LIMIT)
    inverse = tl.div_rn(1.0, d)
    usable = (tl.abs(inverse) <= F32_LARGEST) & (has_nan == 0)
    return tl.where(has_nan, NAN, d), tl.where(usable, inverse, 0.0)


@triton.jit
def truncated(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Rounded towards zero and clamped: fp32 -> int32; a NaN becomes the number next to 0."""
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, LOW * 1.0), HIGH * 1.0).to(tl.int32)


@triton.jit
def rounded(y, LIMIT: tl.constexpr):
    """To the nearest integer within +-LIMIT, halves away from zero as C's roundf: int32."""
    # the added value is less than a half, lest the float below 0.5 be rounded up to 1
    return truncated(y + tl.where(y < 0, -BELOW_HALF, BELOW_HALF), -LIMIT, LIMIT)


@triton.jit
def largest_magnitude(x):
    """The value furthest from 0, the first of several; and whether there is a NaN."""
    is_nan = x != x
    size = tl.where(is_nan, -1.0, tl.abs(x))
    i = tl.arange(0, 32)[None, None, :]
    first = tl.min(tl.where(size == tl.max(size, 2)[:, :, None], i, 32), 2)
    # as bits: their sum keeps the sign of a 0
    bits = tl.where((i == first[:, :, None]) & (is_nan == 0), x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 2).to(tl.float32, bitcast=True), tl.max(is_nan.to(tl.int32), 2) > 0


@triton.jit
def symmetric_codes(x, BITS: tl.constexpr):
    """`x = d (code - half)`, where the largest magnitude has code 0 -> d, int32 codes."""
    half: tl.constexpr = 1 << (BITS - 1)
    extreme, has_nan = largest_magnitude(x)
    d, inverse = scale_and_inverse(extreme, has_nan, -1.0 * half)
    return d, truncated(x * inverse[:, :, None] + (half + 0.5), 0, 2 * half - 1)


@triton.jit
def affine_codes(x, BITS: tl.constexpr):
    """`x = d code + m`, where the smallest value has code 0 -> d, m, int32 codes."""
    last: tl.constexpr = (1 << BITS) - 1
    is_nan = x != x
    has_nan = tl.max(is_nan.to(tl.int32), 2) > 0
    finite = tl.where(is_nan, 0.0, x)
    m = limited(tl.min(finite, 2), F16_LIMIT)
    d, inverse = scale_and_inverse(tl.maximum(tl.max(finite, 2), m) - m, has_nan, last * 1.0)
    m = tl.where(has_nan, NAN, m)
    return d, m, truncated((x - m[:, :, None]) * inverse[:, :, None] + 0.5, 0, last)


@triton.jit
def sum_in_order(x):
    """The sum over each block of [rows, blocks, n], one value after the other, as in C."""
    i = tl.arange(0, x.shape[2])[None, None, :]
    total = tl.zeros((x.shape[0], x.shape[1]), tl.float32)
    for column in range(x.shape[2]):
        total += tl.sum(tl.where(i == column, x, 0.0), 2)
    return total


@triton.jit
def fitted_scale(products, squares, d):
    """The scale of the least squared error of codes that have been chosen; d where all are 0.

    `products` and `squares` are fp32 [rows, blocks, 32]; a NaN stays one.
    """
    low, high = two_halves(products)
    above = sum_in_order(low + high)
    low, high = two_halves(squares)
    below = sum_in_order(low + high)
    return tl.where(below > 0, limited_numbers(tl.div_rn(above, below), F16_LIMIT), d)


@triton.jit
def two_halves(x):
    """The halves of each block: [rows, blocks, n] -> [rows, blocks, n / 2] twice."""
    pairs = tl.reshape(x, (x.shape[0], x.shape[1], 2, x.shape[2] // 2))
    return tl.split(tl.permute(pairs, (0, 1, 3, 2)))


@triton.jit
def pack_nibbles(codes):
    """The low 4 bits of codes, as ggml packs them: [rows, blocks, 32] -> uint8 [rows, bytes]."""
    low, high = two_halves(codes & 15)
    return tl.reshape(low | (high << 4), (codes.shape[0], codes.shape[1] * 16)).to(tl.uint8)


@triton.jit
def load_row_scales(plane, first_row, valid, LARGEST: tl.constexpr):
    """fp16 [rows, 1]; 0 for rows that aren't `valid`; limited as `load_scales` limits them.

    Loaded as words of two rows, since 2 bytes aren't copied to shared memory in the background;
    tiles begin at even rows.
    """
    n = tl.arange(0, valid.shape[0])
    word = tl.load(as_i32(plane) + ((first_row + n) // 2), mask=valid, other=0)
    bits = (word >> (n % 2 * 16)).to(tl.uint16)
    return saturate(bits.to(tl.float16, bitcast=True), largest_scale(LARGEST))[:, None]


@triton.jit
def scale_rows(x, LARGEST_CODE: tl.constexpr):
    """fp16 scales [rows], absmax / LARGEST_CODE rounded up, and x [rows, n] divided by them.

    The scale of a row with a NaN is NaN.
    """
    is_nan = x != x
    has_nan = tl.max(is_nan.to(tl.int32), 1) > 0
    exact = tl.div_rn(tl.max(tl.where(is_nan, 0.0, tl.abs(x)), 1), LARGEST_CODE)
    exact = tl.minimum(tl.maximum(exact, SMALLEST), F16_MAX)
    nearest = exact.to(tl.float16)
    # of positive numbers the next larger one has the next larger bits
    too_small = (nearest.to(tl.float32) < exact).to(tl.int16)
    d = (nearest.to(tl.int16, bitcast=True) + too_small).to(tl.float16, bitcast=True)
    d = tl.where(has_nan, NAN, d.to(tl.float32))
    return d.to(tl.float16), tl.div_rn(x, tl.broadcast_to(d[:, None], x.shape))


@triton.jit
def store_row_halves(plane, rows, valid, x):
    """Store x [rows], fp16, where `valid`; a plane is one pointer, or [rows, 1]."""
    if len(plane.shape) > 0:
        tl.store(as_f16(plane) + rows[:, None], x[:, None], mask=valid[:, None])
    else:
        tl.store(as_f16(plane) + rows, x, mask=valid)
