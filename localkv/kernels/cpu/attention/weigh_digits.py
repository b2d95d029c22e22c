"""Weights of a page's tokens as integers, which integer codes of V are multiplied with.

A block of 32 channels has a scale d for each token, which is multiplied into the weights first:
x = p d. Of a row of weights and a block,

    scale = largest / LARGEST_INTEGER        largest: of the magnitudes of x, and SMALLEST
    n     = round(x * (1 / scale))

and |n| <= 0x7F70 has two signed digits of base 256 (`simd/quads.py`). Tokens that a row doesn't see
have weights of 0, so what becomes of the others does not depend on them.

The products and the reciprocal are rounded to floats, by 2^-24 of at most 2^15 each, and the
integer by a half, so n is off by less than 0.506: ERROR_BOUND of the largest x. The codes
themselves are off by up to a half of 127, of the finest type.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.attention.fetch import Ahead, Lines, fetch_next
from localkv.simd.arithmetic import lanes_below, select, zero_f32
from localkv.simd.digit_rows import larger_products, put_largest, put_sums, split_rows
from localkv.simd.kinds import Address, Count, Vectors
from localkv.simd.lanes import LANES
from localkv.simd.memory import get_f32, get_i32, load_f16, put_f32, put_i32, store_f32
from localkv.simd.quads import DIGITS, ROW_DIGITS
from localkv.simd.vector import load_tuple

LARGEST_INTEGER = np.float32(0x7F70)
ERROR_BOUND = 0.506 / 0x7F70
SMALLEST = np.float32(2.0**-100)
ZERO, ONE = np.float32(0), np.float32(1)
START, SCALE, FACTOR = (DIGITS * ROW_DIGITS + i for i in range(3))
"""Words of a digit row; the last one's is for those who make the others."""
CHUNK = 4 * LANES
"""Tokens that become digits at once."""


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
    """Make digit rows of as many rows of weights as there are `zeros` and `no_sums`, times the
    scales of a block in a plane of V.

    The scale of a digit row is NaN if not all products are finite. The sums start with a correction
    for codes stored `offset` too high; `scales` is room for those of a page.
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
