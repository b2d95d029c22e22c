"""The nuq types for Triton: numbers looked up in a codebook, outliers kept aside.

Planes are d, o, qh of nuq3, qs, and the codebook, fp32 [20] with its bytes in the last four.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl

from localkv.quant_formats.low_bits.gpu import (
    load_third_bits,
    one_after_the_other,
    pack_third_bits,
    pack_two_bits,
    quarter_columns,
)
from localkv.quant_formats.nuq import FRACTION as IN_PARTS
from localkv.quant_formats.nuq import PAIR as VALUES
from localkv.quant_formats.nuq import ROUNDED as ROUNDED_SCALES
from localkv.quant_formats.nuq import SIX_BIT_LIMIT as LARGEST_SHORT
from localkv.quant_formats.nuq import SIX_BITS as DROPPED
from localkv.quant_formats.nuq import STRETCHES
from localkv.quant_formats.shared.codebooks import LARGEST as LARGEST_NUMBER
from localkv.quant_formats.shared.gpu.rows import (
    F16_LIMIT,
    F32_LARGEST,
    NAN,
    as_f16,
    as_i32,
    in_blocks,
    limited,
    limited_numbers,
    load_rows,
    load_scales,
    load_valid_rows,
    nibble_columns,
    pack_nibbles,
    repeat,
    scale_and_inverse,
    store_rows,
)
from localkv.triton_primitives.codebooks import (
    group_number,
    limited_scales_and_missing,
    look_up_eight,
    look_up_four,
    look_up_sixteen,
    numbers_of_nibbles,
    numbers_of_three_bits,
    numbers_of_two_bits,
    outlier_in_groups,
    places_of_nibbles,
    tables_of_eight,
    tables_of_four,
    words_of_table,
)
from localkv.triton_primitives.float_bits import largest_scale
from localkv.triton_primitives.unpack import fence

PAIR = tl.constexpr(VALUES)
LARGEST = tl.constexpr(LARGEST_NUMBER)
FRACTION, PART = tl.constexpr(IN_PARTS * 1.0), tl.constexpr(1 / IN_PARTS)
ROUNDED, SIX_BITS = tl.constexpr(ROUNDED_SCALES), tl.constexpr(DROPPED)
HALF_OF_DROPPED = tl.constexpr(1 << (DROPPED - 1))
SIX_BIT_LIMIT = tl.constexpr(LARGEST_SHORT)
AS_EXTREME, LARGER, SMALLER = (tl.constexpr(stretch) for stretch in STRETCHES)
MOST = tl.constexpr(65472.0)
"""A value with what is missing to it stays within: rounded up it still is finite in fp16."""


@triton.jit
def words_of(codebook):
    """A pointer to the words of a codebook's bytes."""
    return as_i32(codebook) + 16


@triton.jit
def load_words(codebook, N: tl.constexpr):
    """The first N words (1, 2 or 4) of a codebook's bytes."""
    words = words_of(codebook)
    if N == 1:
        return (tl.load(words),)
    elif N == 2:
        return tl.load(words), tl.load(words + 1)
    else:
        return tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)


@triton.jit
def as_i16(plane):
    """A plane of 16-bit words."""
    return plane.to(tl.pointer_type(tl.int16))


@triton.jit
def load_outliers(plane, limit, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """What is missing to an outlier of each 64 channels within +-`limit`, fp16 [rows, WIDTH / 64],
    and its place, int32."""
    rows: tl.constexpr = valid.shape[0]
    pairs: tl.constexpr = WIDTH // PAIR
    if HEAD_DIM == HEAD_DIM // PAIR * PAIR:
        words = load_valid_rows(as_i32(plane), first_row, valid, 0, pairs, HEAD_DIM // PAIR)
        place = words >> 16
        missing = words.to(tl.int16)
    else:
        items = load_valid_rows(as_i16(plane), first_row, valid, 0, 2 * pairs, HEAD_DIM // 32)
        missing, place = tl.split(tl.reshape(items, (rows, pairs, 2)))
        place = place.to(tl.int32)
    missing = missing.to(tl.float16, bitcast=True)
    return tl.minimum(tl.maximum(missing, -limit), limit), place


@triton.jit
def limit_beside(d):
    """What may be missing to an outlier beside scales [rows, WIDTH / 32], so that the sum is finite
    in fp16: [rows, WIDTH / 64]."""
    finite = tl.reshape(tl.where(d == d, d, 0.0), (d.shape[0], d.shape[1] // 2, 2))
    first, second = tl.split(finite)
    return MOST - tl.maximum(tl.abs(first), tl.abs(second)) * LARGEST


@triton.jit
def add_outliers(x, missing, place, channel, FIRST: tl.constexpr):
    """x [rows, n] with outliers [rows, pairs], where a column is `channel` [n] + FIRST; `channel`
    has the columns of each pair together."""
    times: tl.constexpr = x.shape[1] // missing.shape[1]
    is_one = repeat(place & (PAIR - 1), times) == ((channel + FIRST) & (PAIR - 1))[None, :]
    return x + tl.where(is_one, repeat(missing, times), 0.0)


@triton.jit
def first_channels(WIDTH: tl.constexpr):
    """Channels of the first codes of bytes of two bits; the others are 16, 8 and 24 further."""
    byte = tl.arange(0, WIDTH // 4)
    return byte // 8 * 32 + byte % 8


@triton.jit
def quarters_with_outliers(
    a, b, c, e, planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Values of the four codes of each byte from their numbers, fp16 [rows, WIDTH / 4] each."""
    scales = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, LARGEST)
    d = repeat(scales, 8)
    a, b, c, e = a * d, b * d, c * d, e * d
    if HEAD_DIM >= PAIR:
        limit = limit_beside(scales)
        missing, place = load_outliers(planes[1], limit, first_row, valid, HEAD_DIM, WIDTH)
        channel = first_channels(WIDTH)
        a = add_outliers(a, missing, place, channel, 0)
        b = add_outliers(b, missing, place, channel, 16)
        c = add_outliers(c, missing, place, channel, 8)
        e = add_outliers(e, missing, place, channel, 24)
    return a, b, c, e


@triton.jit
def load_pairs(plane, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Items of two blocks at a time, int32 [rows, WIDTH / 64], 0 in rows that aren't `valid`."""
    pairs: tl.constexpr = WIDTH // PAIR
    if HEAD_DIM == HEAD_DIM // PAIR * PAIR:
        return load_valid_rows(as_i32(plane), first_row, valid, 0, pairs, HEAD_DIM // PAIR)
    else:
        items = load_valid_rows(as_i16(plane), first_row, valid, 0, 2 * pairs, HEAD_DIM // 32)
        low, high = tl.split(tl.reshape(items, (valid.shape[0], pairs, 2)))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def load_limited(planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Scales of blocks, in the lower halves of int32 [rows, WIDTH / 32]; what is missing to
    outliers, and their words, int32 [rows, WIDTH / 64] each. For GPUs alone."""
    d = load_pairs(planes[0], first_row, valid, HEAD_DIM, WIDTH)
    o = load_pairs(planes[1], first_row, valid, HEAD_DIM, WIDTH)
    d, missing = limited_scales_and_missing(d, o, largest_scale(LARGEST), MOST)
    scales = repeat(d, 2) >> (16 * (tl.arange(0, WIDTH // 32) % 2))[None, :]
    return scales, missing, o


@triton.jit
def outlier_of_bytes(missing, o, BYTES: tl.constexpr):
    """`outlier_in_groups` for BYTES bytes of codes of each 64 values: [rows, n * BYTES] each."""
    a, b, c, e, group = outlier_in_groups(missing, o)
    a, b, c, e = repeat(a, BYTES), repeat(b, BYTES), repeat(c, BYTES), repeat(e, BYTES)
    return a, b, c, e, repeat(group, BYTES)


@triton.jit
def bit_of_place(place):
    """Where `look_up_four` has the code of a place among 64, int32: 4 times its nibble, of 16 for
    each word of `qs`. From the highest bit on: the word's number, whether it is the second or
    fourth code of a byte, the byte, whether it is the third or fourth one."""
    word_and_half = (place & 32) << 2 | (place & 4) << 4 | (place & 16) << 1
    return word_and_half | (place & 3) << 3 | (place & 8) >> 1


@triton.jit
def values_of_two_bits(qs, planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Values of the four codes of each byte of `qs` [rows, WIDTH / 4], as `quarters_with_outliers`
    has them. For GPUs alone.

    They come from tables of values instead of numbers. Made once for each block, these save a
    product and a comparison for each value. The outlier's code gets a third bit, which selects what
    the code stands for in its place.
    """
    pair_bytes: tl.constexpr = PAIR // 4
    scales, missing, o = load_limited(planes, first_row, valid, HEAD_DIM, WIDTH)
    word = tl.arange(0, WIDTH // 4) % pair_bytes // 4
    bit = repeat(bit_of_place(o >> 16), pair_bytes) - (64 * word)[None, :]
    a, b, c, e = tables_of_four(scales, repeat(missing, 2), words_of(planes[len(planes) - 1]))
    tables = repeat(a, 8), repeat(b, 8), repeat(c, 8), repeat(e, 8)
    return look_up_four(qs, tables, bit)


@triton.jit
def values_of_three_bits(
    qs, thirds, planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Values of codes with a third bit; outliers are added."""
    scales, missing, o = load_limited(planes, first_row, valid, HEAD_DIM, WIDTH)
    a, b, c, e = tables_of_eight(scales, words_of(planes[len(planes) - 1]))
    tables = repeat(a, 8), repeat(b, 8), repeat(c, 8), repeat(e, 8)
    group = tl.broadcast_to(group_number(first_channels(WIDTH))[None, :], qs.shape)
    return look_up_eight(qs, thirds, tables, outlier_of_bytes(missing, o, PAIR // 4), group)


@triton.jit
def values_of_nibbles(qs, planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Values of the low and of the high nibbles of `qs` [rows, WIDTH / 2], over 16. For GPUs
    alone."""
    d = load_pairs(planes[0], first_row, valid, HEAD_DIM, WIDTH)
    o = load_pairs(planes[1], first_row, valid, HEAD_DIM, WIDTH)
    words = words_of_table(words_of(planes[len(planes) - 1]), 4)
    half, turn = places_of_nibbles(WIDTH // 2)
    half = tl.broadcast_to(half[None, :], qs.shape)
    turn = tl.broadcast_to(turn[None, :], qs.shape)
    return look_up_sixteen(qs, words, repeat(d, PAIR // 2), repeat(o, PAIR // 2), half, turn)


@triton.jit
def nearest_codes(y, codebook, CODES: tl.constexpr):
    """The codes of the numbers nearest to y, halfway the upper; of a NaN the first."""
    codes = tl.zeros(y.shape, tl.int32)
    for j in tl.static_range(CODES - 1):
        border = (tl.load(codebook + j) + tl.load(codebook + j + 1)) * 0.5
        codes += (y >= border).to(tl.int32)
    return codes


@triton.jit
def better_scale(
    best, factor, y, parts, kept, codebook, STRETCH: tl.constexpr, CODES: tl.constexpr
):
    """What blocks gain with the codes of STRETCH times y, if that is more than `best`, and the
    factor of their scale: fp32 [rows, blocks] each."""
    numbers = tl.load(codebook + nearest_codes(y * STRETCH, codebook, CODES)).to(tl.int32) * kept
    products = tl.sum(parts * numbers, 2).to(tl.float32)
    squares = tl.sum(numbers * numbers, 2).to(tl.float32)
    fit = tl.where(squares > 0, tl.div_rn(products, squares), 0.0)
    gain = products * fit
    return tl.maximum(gain, best), tl.where(gain > best, fit * PART, factor)


@triton.jit
def fitted_scale(inner, kept, codebook, CODES: tl.constexpr):
    """Scales of blocks: fp32 [rows, blocks].

    Args:
        inner: fp32 [rows, blocks, 32], 0 where a value does not count.
        kept: int32, 1 where it does.
    """
    high, low = tl.max(inner, 2), tl.min(inner, 2)
    extreme = tl.where(high >= -low, high, low)
    extreme = tl.where(extreme == 0, 0.0, extreme)
    d, inverse = scale_and_inverse(extreme, extreme != extreme, LARGEST * 1.0)
    y = inner * inverse[:, :, None]
    parts = (y * FRACTION).to(tl.int32)
    best, factor = tl.zeros_like(d), tl.full(d.shape, 1.0, tl.float32)
    best, factor = better_scale(best, factor, y, parts, kept, codebook, AS_EXTREME, CODES)
    best, factor = better_scale(best, factor, y, parts, kept, codebook, LARGER, CODES)
    best, factor = better_scale(best, factor, y, parts, kept, codebook, SMALLER, CODES)
    if CODES == ROUNDED:
        return six_bits(limited(d * factor, SIX_BIT_LIMIT))
    else:
        return limited(d * factor, F16_LIMIT)


@triton.jit
def six_bits(x):
    """The nearest numbers of six significant bits, halfway those further from 0: fp32."""
    bits = x.to(tl.int32, bitcast=True) + HALF_OF_DROPPED
    return (bits >> SIX_BITS << SIX_BITS).to(tl.float32, bitcast=True)


@triton.jit
def write_codes(
    planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr
):
    """Write scales and outliers of rows; their codes, int32 [rows, WIDTH / 32, 32]."""
    n: tl.constexpr = x.shape[0]
    blocks: tl.constexpr = WIDTH // 32
    codebook = planes[len(planes) - 1]
    x = in_blocks(limited_numbers(x, LARGEST * F16_LIMIT))
    has_nan = tl.max((x != x).to(tl.int32), 2) > 0
    size = tl.where(has_nan[:, :, None], -1.0, tl.abs(x))
    inner = tl.where(has_nan[:, :, None], 0.0, x)
    kept = tl.full(x.shape, 1, tl.int32)
    if HEAD_DIM >= PAIR:
        pairs: tl.constexpr = blocks // 2
        of_pair = tl.reshape(size, (n, pairs, PAIR))
        i = tl.arange(0, PAIR)[None, None, :]
        largest = tl.max(of_pair, 2)
        place = tl.min(tl.where(of_pair == largest[:, :, None], i, PAIR), 2)
        whole = tl.arange(0, pairs) < HEAD_DIM // PAIR
        is_one = (largest >= 0) & whole[None, :]
        chosen = (i == place[:, :, None]) & is_one[:, :, None]
        apart = tl.reshape(chosen, (n, blocks, 32))
        inner = tl.where(apart, 0.0, inner)
        kept = tl.where(apart, 0, kept)
    d = fitted_scale(inner, kept, codebook, CODES)
    halves = tl.where(has_nan, NAN, d).to(tl.float16)
    rounded = halves.to(tl.float32)
    inverse = tl.div_rn(1.0, rounded)
    inverse = tl.where(tl.abs(inverse) <= F32_LARGEST, inverse, 0.0)
    codes = nearest_codes(x * inverse[:, :, None], codebook, CODES)
    store_rows(as_f16(planes[0]), rows, valid, halves, HEAD_DIM // 32)
    if HEAD_DIM >= PAIR:
        left = x - tl.load(codebook + codes) * rounded[:, :, None]
        left = limited(tl.reshape(left, (n, pairs, PAIR)), F16_LIMIT)
        missing = tl.sum(tl.where(chosen, left, 0.0), 2).to(tl.float16)
        place = tl.where(is_one | (largest < 0), place, 0) * whole[None, :].to(tl.int32)
        items = tl.join(missing.to(tl.int16, bitcast=True), place.to(tl.int16))
        items = tl.reshape(items, (n, blocks))
    else:
        items = tl.zeros((n, blocks), tl.int16)
    store_rows(as_i16(planes[1]), rows, valid, items, HEAD_DIM // 32)
    return codes


UNIT = 16.0

LARGEST_MISSING = tl.constexpr(32768.0)
"""Half of fp16's range, as the largest number has beside the largest scale."""
FINITE = tl.constexpr(65504 / 256)
"""What times the largest scale, 256, is finite in fp16."""
OVER_UNIT = tl.constexpr(1 / UNIT)


@triton.jit
def read_tile_nuq4(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[2], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    if PTX and HEAD_DIM >= PAIR:
        low, high = values_of_nibbles(qs, planes, first_row, valid, HEAD_DIM, WIDTH)
    else:
        low, high = numbers_of_nibbles(qs, load_words(planes[3], 4))
        scales = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, FINITE)
        d = repeat(scales, 16)
        low, high = low * d, high * d
        if HEAD_DIM >= PAIR:
            limit = tl.full((1, 1), LARGEST_MISSING, tl.float16)
            missing, place = load_outliers(planes[1], limit, first_row, valid, HEAD_DIM, WIDTH)
            channel, _ = nibble_columns(WIDTH)
            low = add_outliers(low, missing, place, channel, 0)
            high = add_outliers(high, missing, place, channel, 16)
        low, high = low * OVER_UNIT, high * OVER_UNIT
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows_nuq4(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    codes = write_codes(planes, rows, valid, x, HEAD_DIM, WIDTH, 16)
    store_rows(planes[2], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)


@triton.jit
def read_tile_nuq3(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    rows: tl.constexpr = valid.shape[0]
    qs = load_rows(planes[3], first_row, rows, 0, WIDTH // 4, HEAD_DIM // 4)
    thirds, lane = load_third_bits(planes[2], first_row, rows, HEAD_DIM, WIDTH)
    if PTX and HEAD_DIM >= PAIR:
        a, b, c, e = values_of_three_bits(qs, thirds, planes, first_row, valid, HEAD_DIM, WIDTH)
    else:
        a, b, c, e = numbers_of_three_bits(qs, thirds, lane, load_words(planes[4], 2))
        a, b, c, e = quarters_with_outliers(a, b, c, e, planes, first_row, valid, HEAD_DIM, WIDTH)
    low, high = one_after_the_other(a, c), one_after_the_other(b, e)
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows_nuq3(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    codes = write_codes(planes, rows, valid, x, HEAD_DIM, WIDTH, 8)
    store_rows(as_i32(planes[2]), rows, valid, pack_third_bits(codes), HEAD_DIM // 32)
    store_rows(planes[3], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)


@triton.jit
def read_tile_nuq2(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[2], first_row, valid.shape[0], 0, WIDTH // 4, HEAD_DIM // 4)
    if PTX and HEAD_DIM >= PAIR:
        a, b, c, e = values_of_two_bits(qs, planes, first_row, valid, HEAD_DIM, WIDTH)
    else:
        a, b, c, e = numbers_of_two_bits(qs, load_words(planes[3], 1))
        a, b, c, e = quarters_with_outliers(a, b, c, e, planes, first_row, valid, HEAD_DIM, WIDTH)
    low, high = one_after_the_other(a, c), one_after_the_other(b, e)
    return fence(low, PTX), fence(high, PTX)


@triton.jit
def write_rows_nuq2(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    codes = write_codes(planes, rows, valid, x, HEAD_DIM, WIDTH, 4)
    store_rows(planes[2], rows, valid, pack_two_bits(codes), HEAD_DIM // 4)


nuq4 = SimpleNamespace(
    PRODUCT="fp16",
    UNIT=UNIT,
    columns=nibble_columns,
    read_tile=read_tile_nuq4,
    write_rows=write_rows_nuq4,
)
nuq3 = SimpleNamespace(
    PRODUCT="fp16", columns=quarter_columns, read_tile=read_tile_nuq3, write_rows=write_rows_nuq3
)
nuq2 = SimpleNamespace(
    PRODUCT="fp16", columns=quarter_columns, read_tile=read_tile_nuq2, write_rows=write_rows_nuq2
)
