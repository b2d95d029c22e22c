"""Packing rows of codes of a codebook, value by value; the results are those of
`formats/codebook_rows.py`, bit for bit (the payload of a NaN aside).

A block is packed when its turn comes, as if it were the last one of a row; the second of two packs
both once more, without their outlier.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.formats.codebook_rows import PAIR
from localkv.formats.codebooks import LARGEST as LARGEST_NUMBER
from localkv.formats.cpu.low_bits import put_two_bits
from localkv.formats.cpu.rounding import (
    LIMIT,
    ZERO,
    half_bits,
    inverse,
    put_half,
    scale,
    within,
)
from localkv.simd.arithmetic import bits_float
from localkv.simd.memory import get_f32, get_u16, put_i32, put_u8, put_u16

STEPS = np.float32(LARGEST_NUMBER)
LARGEST = STEPS * LIMIT
TO_SINGLE = np.float32(2.0**112)
HALF = np.float32(0.5)


@njit
def value_of_half(bits: int) -> Any:
    """A finite half, not negative, as a float."""
    return bits_float(bits << 13) * TO_SINGLE


@njit
def number(x: Any, i: int) -> Any:
    return within(get_f32(x, i), LARGEST)


@njit
def is_usable(x: Any, first: int) -> bool:
    """Whether there is no NaN among 32 floats."""
    n_numbers = 0
    for i in range(first, first + 32):
        n_numbers += get_f32(x, i) == get_f32(x, i)
    return n_numbers == 32


@njit
def place_of_outlier(x: Any, first: int) -> int:
    """Where the largest magnitude of 64 floats is, the first of several; -1 if both blocks have a
    NaN."""
    place, largest = -1, -np.float32(1)
    for block in range(first, first + PAIR, 32):
        if is_usable(x, block):
            for i in range(block, block + 32):
                magnitude = abs(number(x, i))
                if magnitude > largest:
                    place, largest = i, magnitude
    return place


@njit
def put_scale(x: Any, planes: Any, u: int, outlier: int) -> Any:
    """Write a block's scale and no outlier; the factor that its values are multiplied with."""
    put_u16(planes[1], u, 0)
    if not is_usable(x, 32 * u):
        put_half(planes[0], u, np.float32(np.nan))
        return ZERO
    largest = ZERO
    for i in range(32 * u, 32 * u + 32):
        if i != outlier:
            largest = max(largest, abs(number(x, i)))
    bits = half_bits(scale(largest, STEPS))
    put_u16(planes[0], u, bits)
    return inverse(value_of_half(bits))


@njit
def code_of(x: Any, i: int, factor: Any, codebook: Any, n_codes: int) -> int:
    """The code of the nearest number, halfway the upper; of a NaN the first."""
    y, code = number(x, i) * factor, 0
    for j in range(n_codes - 1):
        code += y >= (get_f32(codebook, j) + get_f32(codebook, j + 1)) * HALF
    return code


@njit
def put_outlier(x: Any, planes: Any, u: int, outlier: int, n_codes: int) -> None:
    """Write what is missing to the outlier of blocks u and u + 1, and its place."""
    if outlier < 0:
        return
    d = value_of_half(get_u16(planes[0], outlier // 32))
    code = code_of(x, outlier, inverse(d), planes[4], n_codes)
    missing = number(x, outlier) - get_f32(planes[4], code) * d
    put_half(planes[1], u, within(missing, LIMIT))
    put_u16(planes[1], u + 1, outlier - 32 * u)


@njit
def put_codes(x: Any, planes: Any, u: int, factor: Any, n_codes: int) -> None:
    """Write a block's codes, of as many bits as tell so many apart; `qs` is the last plane."""
    if n_codes == 16:
        for i in range(16):
            low = code_of(x, 32 * u + i, factor, planes[4], 16)
            high = code_of(x, 32 * u + 16 + i, factor, planes[4], 16)
            put_u8(planes[2], 16 * u + i, low | high << 4)
        return
    qs, third = planes[3] if n_codes == 8 else planes[2], 0
    for i in range(32):
        code = code_of(x, 32 * u + i, factor, planes[4], n_codes)
        third |= (code >> 2) << i
        put_two_bits(qs, u, i, code & 3)
    if n_codes == 8:
        put_i32(planes[2], u, third)


@njit
def encode_block(x: Any, planes: Any, u: int, n_codes: int) -> None:
    """Pack block u, and if it is the second of two, the first one again, without their outlier."""
    outlier = place_of_outlier(x, 32 * (u - 1)) if u % 2 else -1
    for block in range(u - u % 2, u + 1):
        put_codes(x, planes, block, put_scale(x, planes, block, outlier), n_codes)
    if u % 2:
        put_outlier(x, planes, u - 1, outlier, n_codes)
