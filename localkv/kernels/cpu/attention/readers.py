"""What decode attention's readers of pages share: fetching ahead, and factors as rows of digits.

While a page's logits are made, its V comes from memory, and while its V is weighed, the next page's
K. If one type has more bytes than its share of the time, what is left of them is fetched during the
other's: so the memory is as busy all the time. That is two runs of lines to fetch at once.

Weights of a page's tokens are integers, which integer codes of V are multiplied with. A block of 32
channels has a scale d for each token, which is multiplied into the weights first: x = p d. Of a row
of weights and a block,

    scale = largest / LARGEST_INTEGER        largest: of the magnitudes of x, and SMALLEST
    n     = round(x * (1 / scale))

and |n| <= 0x7F70 has two signed digits of base 256 (`simd/quads.py`). Tokens that a row doesn't see
have weights of 0, so what becomes of the others does not depend on them.

The products and the reciprocal are rounded to floats, by 2^-24 of at most 2^15 each, and the
integer by a half, so n is off by less than 0.506: ERROR_BOUND of the largest x. The codes
themselves are off by up to a half of 127, of the finest type.

Where scales belong to channels, codes are multiplied with rows of floats times a vector, as
integers of two digits, or as floats. Such a row in scratch memory has room for 512 floats or for
the digits of as many integers, four a word, and for a few numbers after them:

    word    0 .. 127       256 .. 383    512 .. 519   520      521       528 .. 535
            high digits    low digits    starts       scale    factor    sums

A *part* of a row is what has a start of its own, and a sum: all channels of a query on the side of
K, 32 tokens of a page on the side of V. Starts make up for codes that are read `offset` too large.
The scale is one for a whole row: a channel may be much smaller than the largest, but its codes
times n err by as much as theirs. Of 512 codes of at most 128 the sum stays below 2^31.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.sizes import CHANNEL_ROW, CHUNK, MOST_CHANNELS
from localkv.simd import LANES
from localkv.simd.arithmetic import lanes_below, select, zero_f32
from localkv.simd.kinds import Address, Count, Vectors
from localkv.simd.memory import get_f32, get_i32, load_f16, prefetch, put_f32, put_i32, store_f32
from localkv.simd.quads import (
    DIGITS,
    ROW_DIGITS,
    larger_products,
    put_largest,
    put_sums,
    split_rows,
)
from localkv.simd.vector import load_tuple

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
ERROR_BOUND = 0.506 / 0x7F70
SMALLEST = np.float32(2.0**-100)
ZERO, ONE = np.float32(0), np.float32(1)
START, SCALE, FACTOR = (DIGITS * ROW_DIGITS + i for i in range(3))
"""Words of a digit row; the last one's is for those who make the others."""


@njit(error_model="numpy")
def split_weights(
    digits: Address,
    p: Address,
    scales: Address,
    plane: Address,
    block: int,
    n_blocks: Count,
    offset: Count,
    n_tokens: Count,
    zeros: Vectors,
    no_sums: Vectors,
    ahead: Ahead,
    lines: Lines,
) -> Ahead:
    """Make a digit row of each row of weights, one for each of `zeros` and `no_sums`, times the
    scales of a block in a plane of V.

    The scale of a digit row is NaN if not all products are finite. The sums start with a correction
    for codes stored `offset` too high; `scales` is room for a page's.
    """
    largest, sums = zeros, no_sums
    for t in range(0, (n_tokens + CHUNK - 1) // CHUNK * CHUNK, LANES):
        # rows that were never written may hold NaN
        scale = load_f16(plane, (t // LANES * n_blocks + block) * LANES)
        scale = select(lanes_below(n_tokens - t), scale, zero_f32())
        store_f32(scales, t, scale)
        largest = larger_products(largest, p, t, PAGE_TOKENS, scale)
        ahead = fetch_next(ahead, lines)
    put_largest(digits, SCALE, PAGE_TOKENS, largest)
    for row in range(len(zeros)):
        at = row * PAGE_TOKENS
        top = get_f32(digits, at + SCALE)
        scale_of_row = max(top, SMALLEST) / LARGEST_INTEGER
        put_f32(digits, at + FACTOR, ONE / scale_of_row)
        put_f32(digits, at + SCALE, scale_of_row + top * ZERO)
    for t in range(0, n_tokens, CHUNK):
        of_tokens = load_tuple(scales, t, LANES, 4)
        sums = split_rows(sums, p, t, PAGE_TOKENS, of_tokens, digits, t // 4, FACTOR)
    put_sums(digits, START, PAGE_TOKENS, sums)
    for row in range(len(zeros)):
        at = row * PAGE_TOKENS + START
        put_i32(digits, at, -offset * get_i32(digits, at))
    return ahead


PARTS = 8
CHANNEL_DIGITS = MOST_CHANNELS // DIGITS
"""Words from a row's higher digits to its lower ones."""
CHANNEL_START = DIGITS * CHANNEL_DIGITS
CHANNEL_SCALE = CHANNEL_START + PARTS
CHANNEL_FACTOR, CHANNEL_SUMS = CHANNEL_SCALE + 1, CHANNEL_SCALE + PARTS
AT_SCALE = CHANNEL_SCALE - CHANNEL_START - 1
"""Where a row's scale is, seen from where `add_digits` expects one."""


@njit(error_model="numpy")
def put_factors(rows: Address, n_rows: Count) -> None:
    """Scales and factors of rows whose largest magnitudes are in their places; the scale of a row
    that isn't finite is NaN."""
    for row in range(n_rows):
        at = row * CHANNEL_ROW
        top = get_f32(rows, at + CHANNEL_SCALE)
        scale = max(top, SMALLEST) / LARGEST_INTEGER
        put_f32(rows, at + CHANNEL_FACTOR, ONE / scale)
        put_f32(rows, at + CHANNEL_SCALE, scale + top * ZERO)


@njit
def put_starts(rows: Address, n_rows: Count, part: Count, offset: Count) -> None:
    """Starts of a part from the sums of its integers, which are in their place."""
    for row in range(n_rows):
        at = row * CHANNEL_ROW + CHANNEL_START + part
        put_i32(rows, at, -offset * get_i32(rows, at))
