"""Common parts of types with codebooks: numbers looked up, outliers apart
(`formats/codebook_rows.py`). The last plane is the codebook, fp32 [20] with its bytes in the last
four."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.codebook_rows import FRACTION as IN_PARTS
from localkv.formats.codebook_rows import PAIR as VALUES
from localkv.formats.codebook_rows import STRETCHES
from localkv.formats.codebooks import LARGEST as LARGEST_NUMBER
from localkv.formats.gpu.planes import (
    as_f16,
    as_i32,
    load_scales,
    load_valid_rows,
    repeat,
    store_rows,
)
from localkv.formats.gpu.rounding import (
    F16_LIMIT,
    F32_LARGEST,
    NAN,
    in_blocks,
    limited,
    limited_numbers,
    scale_and_inverse,
)
from localkv.triton_primitives.codebooks import (
    add_where_equal,
    look_up_values,
    tables_of_values,
)

PAIR = tl.constexpr(VALUES)
LARGEST = tl.constexpr(LARGEST_NUMBER)
FRACTION, PART = tl.constexpr(IN_PARTS * 1.0), tl.constexpr(1 / IN_PARTS)
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
def place_number(channel):
    """A channel's place among 64 as fp16: 1024 more, which takes no conversion."""
    return (0x6400 | (channel & (PAIR - 1))).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def load_outliers(plane, d, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """What is missing to an outlier of each 64 channels, fp16 [rows, WIDTH / 64], and its place,
    int32.

    Args:
        d: the scales of blocks. What is missing is limited so that the sum is finite in fp16.
    """
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
    first, second = tl.split(tl.reshape(tl.where(d == d, d, 0.0), (rows, pairs, 2)))
    limit = MOST - tl.maximum(tl.abs(first), tl.abs(second)) * LARGEST
    missing = missing.to(tl.float16, bitcast=True)
    return tl.minimum(tl.maximum(missing, -limit), limit), place


@triton.jit
def add_outliers(x, missing, place, channel, FIRST: tl.constexpr, PTX: tl.constexpr):
    """x [rows, n] with outliers [rows, pairs], where a column is `channel` [n] + FIRST.

    `channel` has those of each pair together. It is the same for all parts of a tile, so that their
    columns share registers, and places differ.
    """
    shape: tl.constexpr = x.shape
    times: tl.constexpr = x.shape[1] // missing.shape[1]
    column = tl.broadcast_to(place_number(channel)[None, :], shape)
    place = repeat(place_number(place - FIRST), times)
    return add_where_equal(x, place, repeat(missing, times), column, PTX)


@triton.jit
def quarters_with_outliers(
    a, b, c, e, planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX
):
    """Values of the four codes of each byte from their numbers, fp16 [rows, WIDTH / 4] each."""
    scales = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, LARGEST)
    d = repeat(scales, 8)
    a, b, c, e = a * d, b * d, c * d, e * d
    if HEAD_DIM >= PAIR:
        missing, place = load_outliers(planes[1], scales, first_row, valid, HEAD_DIM, WIDTH)
        byte = tl.arange(0, WIDTH // 4)
        channel = byte // 8 * 32 + byte % 8
        a = add_outliers(a, missing, place, channel, 0, PTX)
        b = add_outliers(b, missing, place, channel, 16, PTX)
        c = add_outliers(c, missing, place, channel, 8, PTX)
        e = add_outliers(e, missing, place, channel, 24, PTX)
    return a, b, c, e


@triton.jit
def bit_of_place(place):
    """Where `look_up_values` has the code of a place among 64, int32: 4 times its nibble, of 16 for
    each word of `qs`. From the highest bit on: the word's number, whether it is the second or
    fourth code of a byte, the byte, whether it is the third or fourth one."""
    word_and_half = (place & 32) << 2 | (place & 4) << 4 | (place & 16) << 1
    return word_and_half | (place & 3) << 3 | (place & 8) >> 1


@triton.jit
def looked_up_quarters(qs, planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Values of the four codes of each byte of `qs` [rows, WIDTH / 4], as those that
    `quarters_with_outliers` has, from tables of values instead of numbers: made once for each
    block, they save a product and a comparison for each value. The outlier's code gets a third bit,
    which selects what the code stands for in its place. For GPUs alone."""
    pair_bytes: tl.constexpr = PAIR // 4
    scales = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, LARGEST)
    if HEAD_DIM >= PAIR:
        missing, place = load_outliers(planes[1], scales, first_row, valid, HEAD_DIM, WIDTH)
        missing = repeat(missing, 2)
        word = tl.arange(0, WIDTH // 4) % pair_bytes // 4
        bit = repeat(bit_of_place(place), pair_bytes) - (64 * word)[None, :]
    else:
        missing = tl.zeros_like(scales)
        bit = tl.full(qs.shape, 64, tl.int32)
    a, b, c, e = tables_of_values(scales, missing, words_of(planes[len(planes) - 1]))
    tables = repeat(a, 8), repeat(b, 8), repeat(c, 8), repeat(e, 8)
    return look_up_values(qs, tables, bit)


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
    """What blocks gain with the codes of so many times y, if that is more than `best`, and the
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
    return limited(d * factor, F16_LIMIT)


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
