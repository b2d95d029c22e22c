"""From floats to codes, value by value, for the encoders of all cache types.

The results are those of `formats/rounding.py`, bit for bit (the payload of a NaN and the sign
of a minimum of 0 aside). Nothing here needs instructions of a certain CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.simd.arithmetic import bits_float, float_bits
from localkv.simd.memory import get_f32, put_u16

LIMIT = np.float32(65519.99609375)
"""The largest float32 that rounds to a finite half."""

INFINITE_BITS = 0xFF << 23
INFINITY = np.float32(np.inf)
BELOW_HALF = np.float32(0.5 - 2**-25)
ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)


@njit
def small_float(x: Any, mantissa: int, bias: int) -> Any:
    """Magnitude of a number with few bits, rounded to even; one too large has any exponent."""
    bits = float_bits(x) & 0x7FFFFFFF
    if bits < (128 - bias) << 23:
        # the last bit of this number counts as much as that of a subnormal result
        number = (151 - bias - mantissa) << 23
        return float_bits(bits_float(bits) + bits_float(number)) - number
    shift = 23 - mantissa
    odd = bits >> shift & 1
    return (bits + (1 << (shift - 1)) - 1 + odd - ((127 - bias) << 23)) >> shift


@njit
def sign_bit(x: Any) -> Any:
    return float_bits(x) >> 31


@njit
def half_bits(x: Any) -> Any:
    """As half precision, rounded to even, to infinity from 65520 on."""
    bits = float_bits(x) & 0x7FFFFFFF
    magnitude = 0x7E00 if bits > INFINITE_BITS else min(small_float(x, 10, 15), 0x7C00)
    return magnitude | sign_bit(x) << 15


@njit
def put_half(base: Any, index: int, x: Any) -> None:
    put_u16(base, index, half_bits(x))


@njit
def within(x: Any, limit: Any) -> Any:
    """Clamped to [-limit, limit]; a NaN stays one."""
    if x > limit:
        return limit
    return -limit if x < -limit else x


@njit
def float8_bits(x: Any, mantissa: int, bias: int, largest: Any) -> Any:
    """As an 8-bit float; larger values become the largest, NaN becomes 0x7F."""
    magnitude = 0x7F if x != x else small_float(within(x, largest), mantissa, bias)
    return magnitude | sign_bit(x) << 7


@njit(error_model="numpy")
def scale(extreme: Any, steps: Any) -> Any:
    """extreme / steps within the range of a half."""
    return within(extreme / steps, LIMIT)


@njit(error_model="numpy")
def inverse(d: Any) -> Any:
    """1 / d, or 0 if that is not finite."""
    factor = ONE / d
    return factor if abs(factor) <= np.float32(3.4028235e38) else ZERO


@njit
def truncated(y: Any, smallest: Any, largest: Any) -> Any:
    """Rounded towards zero and clamped; a NaN becomes 0."""
    if y != y:
        return 0
    return int(max(min(y, largest), smallest))


@njit
def rounded(y: Any, limit: Any) -> Any:
    """To the nearest integer within +-limit, halves away from zero as C's roundf; a NaN is 0."""
    # the added value is less than a half, lest the float below 0.5 be rounded up
    y += BELOW_HALF if y >= ZERO else -BELOW_HALF
    return truncated(y, -limit, limit)


@njit
def largest_magnitude(x: Any, start: int, limit: Any = INFINITY) -> Any:
    """Of 32 floats, clamped, the one furthest from 0, the first of several, or NaN."""
    extreme = within(get_f32(x, start), limit)
    if extreme != extreme:
        return extreme
    for i in range(1, 32):
        value = within(get_f32(x, start + i), limit)
        if value != value:
            return value
        if abs(value) > abs(extreme):
            extreme = value
    return extreme


@njit
def least_and_largest(x: Any, start: int, n: int) -> Any:
    """Of n floats, or NaN twice."""
    low = high = get_f32(x, start)
    for i in range(n):
        value = get_f32(x, start + i)
        if value != value:
            return value, value
        low, high = min(low, value), max(high, value)
    return low, high


@njit
def affine_scale(x: Any, start: int, last: Any, n: int = 32) -> Any:
    """d and m of `x = d code + m`, where the least of n values has code 0 and the largest the
    last."""
    low, high = least_and_largest(x, start, n)
    m = within(low, LIMIT)
    # a NaN stays one: it is neither more nor less
    return scale((m if high < m else high) - m, last), m


@njit
def symmetric_code(value: Any, factor: Any, half: Any) -> Any:
    return truncated(value * factor + (half + HALF), ZERO, half + half - ONE)


@njit
def affine_code(value: Any, m: Any, factor: Any, last: Any) -> Any:
    return truncated((value - m) * factor + HALF, ZERO, last)
