"""From floats to codes, for the encoders of all cache types: value by value, with the scale of a
row, and with scales by channel for a group of tokens.

The results are the references' (`shared/rounding.py`, `shared/channel_groups.py`), bit for bit but
for the payload of a NaN and the sign of a minimum of 0. Nothing here needs instructions of a
certain CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.shared import channel_groups
from localkv.quant_formats.shared.rounding import LARGEST_HALF, SMALLEST_HALF
from localkv.simd.arithmetic import bits_float, float_bits
from localkv.simd.memory import get_f16, get_f32, put_u8, put_u16

LIMIT = np.float32(65519.99609375)
"""The largest float32 that rounds to a finite half."""

INFINITE_BITS = 0xFF << 23
INFINITY = np.float32(np.inf)
BELOW_HALF = np.float32(0.5 - 2**-25)
ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)
NAN = np.float32(np.nan)
SMALLEST, LARGEST = np.float32(SMALLEST_HALF), np.float32(LARGEST_HALF)
CHANNEL_LIMIT = np.float32(channel_groups.LARGEST)
"""The largest magnitude of a value with a channel's scale."""


@njit
def small_float(x: Any, mantissa: int, bias: int) -> Any:
    """Magnitude of a number with few bits, rounded to even; one too large has any exponent."""
    bits = float_bits(x) & 0x7FFFFFFF
    if bits < (128 - bias) << 23:
        # the last bit of this number counts as much as the last bit of a subnormal result
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
    """The bits of a half, rounded to even, to infinity from 65520 on."""
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
    """The bits of an 8-bit float; larger values become the largest, NaN becomes 0x7F."""
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
    """The one of 32 floats, clamped, that is furthest from 0, the first of several, or NaN."""
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
    """The least and the largest of n floats, or NaN twice."""
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
def put_symmetric_scale(x: Any, planes: Any, u: int, half: Any) -> Any:
    """Store d of block u, whose largest magnitude has code 0, in plane 0; the factor of its
    codes."""
    d = scale(largest_magnitude(x, 32 * u), -half)
    put_half(planes[0], u, d)
    return inverse(d)


@njit
def put_affine_scale(x: Any, planes: Any, u: int, last: Any) -> Any:
    """Store d and m of block u in planes 0 and 1; the factor of its codes, and m."""
    d, m = affine_scale(x, 32 * u, last)
    put_half(planes[0], u, d)
    put_half(planes[1], u, m)
    return inverse(d), m


@njit
def symmetric_code(value: Any, factor: Any, half: Any) -> Any:
    return truncated(value * factor + (half + HALF), ZERO, half + half - ONE)


@njit
def affine_code(value: Any, m: Any, factor: Any, last: Any) -> Any:
    return truncated((value - m) * factor + HALF, ZERO, last)


@njit
def half_value(bits: int) -> Any:
    """A positive finite number of half precision."""
    if bits < 1 << 10:
        return np.float32(bits) * SMALLEST
    return bits_float((bits << 13) + (112 << 23))


@njit(error_model="numpy")
def put_row_scale(x: Any, n: int, largest: Any, plane: Any) -> Any:
    """Store the scale of n floats, and return it as a float."""
    top = ZERO
    for i in range(n):
        size = abs(get_f32(x, i))
        top = size if size > top or size != size else top
        if top != top:
            put_u16(plane, 0, 0x7E00)
            return NAN
    exact = min(max(top / largest, SMALLEST), LARGEST)
    bits = half_bits(exact)
    # of positive numbers the next larger one has the next larger bits
    if half_value(bits) < exact:
        bits += 1
    put_u16(plane, 0, bits)
    return half_value(bits)


@njit
def stored(halves: Any, index: int, x: Any) -> Any:
    """What fp16 makes of a float, which is stored."""
    put_half(halves, index, x)
    return get_f16(halves, index)


@njit
def range_of_channel(x: Any, channel: int, head_dim: int, tokens: int) -> Any:
    """The least and the largest of a channel's values in rows of `head_dim` floats, within
    CHANNEL_LIMIT, or NaN."""
    low = high = within(get_f32(x, channel), CHANNEL_LIMIT)
    for token in range(tokens):
        value = within(get_f32(x, token * head_dim + channel), CHANNEL_LIMIT)
        if value != value:
            return value, value
        low, high = min(low, value), max(high, value)
    return low, high


@njit
def affine_channel(x: Any, channel: int, head_dim: int, planes: Any, last: Any, tokens: int) -> Any:
    """Store d and m of a channel, in planes 0 and 1; the minimum and the factor of its codes."""
    low, high = range_of_channel(x, channel, head_dim, tokens)
    least = stored(planes[1], channel, low)
    # a NaN stays one: it is neither more nor less
    spread = (least if high < least else high) - least
    return least, inverse(stored(planes[0], channel, scale(spread, last)))


@njit
def symmetric_channel(
    x: Any, channel: int, head_dim: int, planes: Any, last: Any, tokens: int
) -> Any:
    """Store d of a channel, in plane 0; the factor of its codes."""
    low, high = range_of_channel(x, channel, head_dim, tokens)
    return inverse(stored(planes[0], channel, scale(max(abs(low), abs(high)), last)))


@njit
def signed_code(value: Any, factor: Any, last: Any) -> Any:
    """The code of a symmetric channel's value: halves are rounded away from 0."""
    y = value * factor
    half = BELOW_HALF if y >= ZERO else -BELOW_HALF
    return truncated(y + half, -last, last)


@njit
def encode_channels(
    x: Any, planes: Any, codes: Any, head_dim: int, last: Any, affine: bool, tokens: int
) -> None:
    """A group float32 [tokens, head_dim] -> its halves in the first planes, codes as bytes [tokens,
    head_dim]."""
    for channel in range(head_dim):
        least = ZERO
        if affine:
            least, factor = affine_channel(x, channel, head_dim, planes, last, tokens)
        else:
            factor = symmetric_channel(x, channel, head_dim, planes, last, tokens)
        for token in range(tokens):
            at = token * head_dim + channel
            value = get_f32(x, at)
            if affine:
                put_u8(codes, at, affine_code(value, least, factor, last))
            else:
                put_u8(codes, at, signed_code(value, factor, last))
