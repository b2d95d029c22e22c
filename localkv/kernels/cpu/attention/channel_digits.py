"""What codes are multiplied with whose scales belong to channels: rows of floats times a vector, as
integers of two digits, or as floats.

A row in scratch memory has room for 512 floats or for the digits of as many integers
(`simd/quads.py` says what digits are), four a word, and for a few numbers after them:

    word    0 .. 127       256 .. 383    512 .. 519   520      521       528 .. 535
            high digits    low digits    starts       scale    factor    sums

A *part* of a row is what has a start of its own, and a sum: all channels of a query on the side of
K, 32 tokens of a page on the side of V. Starts make up for codes that are read `offset` too large.

    scale = largest / LARGEST_INTEGER        n = round(x * (1 / scale)), |n| <= 0x7F70

as in `attention/weigh_digits.py`, whose bounds hold here, too. The scale is one for a whole row: a
channel may be much smaller than the largest, but its codes times n err by as much as theirs. Of 512
codes of at most 128 the sum stays below 2^31.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from localkv.kernels.cpu.attention.sizes import CHANNEL_ROW, MOST_CHANNELS
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, get_i32, put_f32, put_i32
from localkv.simd.quads import DIGITS

LARGEST_INTEGER = np.float32(0x7F70)
ERROR_BOUND = 0.506 / 0x7F70
SMALLEST = np.float32(2.0**-100)
ZERO, ONE = np.float32(0), np.float32(1)
PARTS = 8
CHANNEL_DIGITS = MOST_CHANNELS // DIGITS
"""Words from a row's higher digits to its lower ones."""
START = DIGITS * CHANNEL_DIGITS
SCALE = START + PARTS
FACTOR, SUMS = SCALE + 1, SCALE + PARTS
AT_SCALE = SCALE - START - 1
"""Where a row's scale is, seen from where `add_digits` expects one."""


@njit(error_model="numpy")
def put_factors(rows: Address, n_rows: Count) -> None:
    """Scales and factors of rows whose largest magnitudes are in their places; the scale of a row
    that isn't finite is NaN."""
    for row in range(n_rows):
        at = row * CHANNEL_ROW
        top = get_f32(rows, at + SCALE)
        scale = max(top, SMALLEST) / LARGEST_INTEGER
        put_f32(rows, at + FACTOR, ONE / scale)
        put_f32(rows, at + SCALE, scale + top * ZERO)


@njit
def put_starts(rows: Address, n_rows: Count, part: Count, offset: Count) -> None:
    """Starts of a part from the sums of its integers, which are in their place."""
    for row in range(n_rows):
        at = row * CHANNEL_ROW + START + part
        put_i32(rows, at, -offset * get_i32(rows, at))
