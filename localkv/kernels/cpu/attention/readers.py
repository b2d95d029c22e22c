"""What decode attention's readers of pages share: fetching ahead, and factors as rows of digits.

While a page's logits are made, its V comes from memory, and while its V is weighed, the next page's
K. If one type has more bytes than its share of the time, what is left of them is fetched during the
other's. So the memory is as busy all the time. That is two runs of lines to fetch at once.

Weights of a page's tokens are integers, which integer codes of V are multiplied with. A block of 32
channels has a scale d for each token, which is multiplied into the weights first: x = p d. Of a row
of weights, for all of its blocks,

    scale = largest / LARGEST_INTEGER        largest: of the magnitudes of x, and SMALLEST
    n     = round(x * (LARGEST_INTEGER / largest))

and |n| <= 0x7F70 has two signed digits of base 256 (`simd/quads.py`). Tokens that a row doesn't see
have weights of 0, so what becomes of the others does not depend on them.

The products, the factor and the scale are rounded to floats, by 2^-24 of at most 2^15 each, and the
integer by a half, so n is off by less than 0.51: ERROR_BOUND of the largest x. The codes themselves
are off by up to a half of 127, of the finest type.

Where scales belong to channels, codes are multiplied with rows of floats times a vector, as
integers of two digits, or as floats. Such a row in scratch memory has room for 512 floats or for
the digits of as many integers, four a word, and for a few numbers after them:

    word    0 .. 127       248 .. 255    256 .. 383    512 .. 519    520      521
            high digits    inverses      low digits    starts        scale    factor

            528 .. 535     536 .. 543
            sums           scales

A *part* of a row is what has a start of its own, and a sum. On the side of K it is all channels of
a query, on the side of V 32 tokens of a page. Starts make up for codes that are read `offset` too
large. The scale is one for a whole row: a channel may be much smaller than the largest, but its
codes times n err by as much as the largest's. Of 512 codes of at most 128 the sum stays below 2^31.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.sizes import CHANNEL_ROW, CHUNK, MOST_CHANNELS
from localkv.simd import LANES
from localkv.simd.arithmetic import (
    absolute,
    at_least,
    f32x16,
    fma,
    lanes_below,
    larger_magnitudes,
    select,
    sum_lanes,
    zero_f32,
)
from localkv.simd.kinds import Address, Count, Lanes, Vectors
from localkv.simd.memory import get_f32, get_i32, load_f16, prefetch, put_f32, put_i32
from localkv.simd.quads import (
    DIGITS,
    ROW_DIGITS,
    larger_products,
    put_largest,
    put_sums,
    split_rows,
)

Ahead = tuple[Address, Address]
"""Where the next lines of two runs are."""
Lines = tuple[Count, Count]
"""How many lines of each to fetch at a time."""


@njit
def fetch_next(ahead: Ahead, lines: Lines) -> Ahead:
    """Ask for the next lines; where those after them are."""
    for line in range(lines[0]):
        prefetch(ahead[0], line * 64)
    for line in range(lines[1]):
        prefetch(ahead[1], line * 64)
    return ahead[0] + lines[0] * 64, ahead[1] + lines[1] * 64


@njit
def share_of(lines: Lines, n: int) -> Lines:
    """One of `n` parts, rounded down."""
    return lines[0] // n, lines[1] // n


@njit
def without(lines: Lines, others: Lines) -> Lines:
    return lines[0] - others[0], lines[1] - others[1]


LARGEST_INTEGER = np.float32(0x7F70)
ONE_INTEGER = np.float32(1 / 0x7F70)
ERROR_BOUND = 0.51 / 0x7F70
SMALLEST = np.float32(2.0**-100)
ZERO, ONE = np.float32(0), np.float32(1)
START, SCALE, FACTOR, ROW_SCALE = (DIGITS * ROW_DIGITS + i for i in range(4))
"""Words of a digit row. The last two are for those who make the others: the scale of all blocks,
and its inverse."""
LARGEST_F16 = np.float32(65504)


@njit(error_model="numpy")
def put_scale(digits: Address, at: int, scale: int, factor: int) -> None:
    """A row's scale and factor at these words, from the largest magnitude, which is at the scale's
    place; the scale of a row that isn't finite is NaN."""
    top = get_f32(digits, at + scale)
    largest = max(top, SMALLEST)
    put_f32(digits, at + factor, LARGEST_INTEGER / largest)
    put_f32(digits, at + scale, largest * ONE_INTEGER + top * ZERO)


@njit
def load_token_scales(
    plane: Address, t: int, block: int, n_blocks: Count, n_tokens: Count
) -> Lanes:
    """The scales of a block of 16 tokens from token `t` on; rows that were never written may hold
    NaN."""
    scale = load_f16(plane, (t // LANES * n_blocks + block) * LANES)
    return select(lanes_below(n_tokens - t), scale, zero_f32())


@njit
def scale_weights_of_page(
    digits: Address, p: Address, plane: Address, n_blocks: Count, n_tokens: Count, zeros: Vectors
) -> None:
    """Put the scale and the factor of each row of weights, one for each of `zeros`, in its digit
    row: from the largest product with the finite scales of all blocks in a plane of V."""
    largest, most = zeros, f32x16(LARGEST_F16)
    for t in range(0, n_tokens, LANES):
        scale = zero_f32()
        for block in range(n_blocks):
            one = load_token_scales(plane, t, block, n_blocks, n_tokens)
            one = select(at_least(most, absolute(one)), one, zero_f32())
            scale = larger_magnitudes(one, scale)
        largest = larger_products(largest, p, t, PAGE_TOKENS, scale)
    put_largest(digits, ROW_SCALE, PAGE_TOKENS, largest)
    for row in range(len(zeros)):
        put_scale(digits, row * PAGE_TOKENS, ROW_SCALE, FACTOR)


@njit
def split_weights(
    digits: Address,
    p: Address,
    plane: Address,
    block: int,
    n_blocks: Count,
    offset: Count,
    n_tokens: Count,
    no_sums: Vectors,
    ahead: Ahead,
    lines: Lines,
) -> Ahead:
    """Make a digit row of each row of weights, one for each of `no_sums`, times the scales of a
    block in a plane of V.

    The sums start with a correction for codes stored `offset` too high. What a scale that isn't
    finite makes NaN is its block.
    """
    sums, lines = no_sums, (lines[0] * 4, lines[1] * 4)
    nothing, zero = zero_f32(), zero_f32()
    for t in range(0, n_tokens, CHUNK):
        ahead = fetch_next(ahead, lines)
        scales = (
            load_token_scales(plane, t, block, n_blocks, n_tokens),
            load_token_scales(plane, t + LANES, block, n_blocks, n_tokens),
            load_token_scales(plane, t + 2 * LANES, block, n_blocks, n_tokens),
            load_token_scales(plane, t + 3 * LANES, block, n_blocks, n_tokens),
        )
        sums = split_rows(sums, p, t, PAGE_TOKENS, scales, digits, t // 4, FACTOR)
        for scale in scales:
            nothing = fma(scale, zero, nothing)
    not_finite = sum_lanes(nothing)  # 0 or NaN
    if offset:
        put_sums(digits, START, PAGE_TOKENS, sums)
    for row in range(len(no_sums)):
        at = row * PAGE_TOKENS
        put_i32(digits, at + START, -offset * get_i32(digits, at + START) if offset else 0)
        put_f32(digits, at + SCALE, get_f32(digits, at + ROW_SCALE) + not_finite)
    return ahead


PARTS = 8
CHANNEL_DIGITS = MOST_CHANNELS // DIGITS
"""Words from a row's higher digits to its lower ones."""
CHANNEL_START = DIGITS * CHANNEL_DIGITS
CHANNEL_SCALE = CHANNEL_START + PARTS
CHANNEL_FACTOR, CHANNEL_SUMS = CHANNEL_SCALE + 1, CHANNEL_SCALE + PARTS
AT_SCALE = CHANNEL_SCALE - CHANNEL_START - 1
"""Where a row's scale is, seen from where `add_digits` expects one."""
GROUP_SCALES, GROUP_INVERSES = CHANNEL_SUMS + PARTS, CHANNEL_DIGITS - PARTS
"""On the side of K the first row has the largest scale of each group of a page, and its inverse."""


@njit
def put_factors(rows: Address, n_rows: Count) -> None:
    """Scales and factors of rows whose largest magnitudes are in their places."""
    for row in range(n_rows):
        put_scale(rows, row * CHANNEL_ROW, CHANNEL_SCALE, CHANNEL_FACTOR)


@njit
def put_starts(rows: Address, n_rows: Count, part: Count, offset: Count) -> None:
    """Starts of a part from the sums of its integers, which are in their place."""
    for row in range(n_rows):
        at = row * CHANNEL_ROW + CHANNEL_START + part
        put_i32(rows, at, -offset * get_i32(rows, at))
