"""q6_0: nibbles with two bits above, less 32; planes d, qh, qs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.shared.cpu.rounding import (
    LIMIT,
    ZERO,
    inverse,
    largest_magnitude,
    put_half,
    scale,
    symmetric_code,
    within,
)
from localkv.simd.arithmetic import i32x16, to_f32
from localkv.simd.integer import (
    add_i32,
    and_i32,
    high_nibble,
    high_nibbles,
    low_nibble,
    low_nibbles,
    shift_left,
)
from localkv.simd.memory import get_f32, get_u8, load_nibbles, load_u8, put_u8
from localkv.simd.quads import load_quads, load_quads_of_nibbles

HALF = np.float32(32)
LARGEST = np.float32(32 * 65519.99609375)

LOW, HIGH = np.int32(0x03030303), np.int32(0x0C0C0C0C)
"""Bits of the nibbles of `qh`: of the low codes, and of the codes 16 further."""


@njit
def decode(planes: Any, u: int) -> Any:
    packed, above = load_u8(planes[2], u * 16), load_nibbles(planes[1], u * 8)
    low = shift_left(and_i32(above, i32x16(LOW)), i32x16(np.int32(4)))
    high = shift_left(and_i32(above, i32x16(HIGH)), i32x16(np.int32(2)))
    less = i32x16(np.int32(-32))
    low, high = add_i32(low_nibble(packed), low), add_i32(high_nibble(packed), high)
    return to_f32(add_i32(low, less)), to_f32(add_i32(high, less))


@njit
def quads(planes: Any, u: int) -> Any:
    packed, above = load_quads(planes[2], u * 16), load_quads_of_nibbles(planes[1], u * 8)
    low = shift_left(and_i32(above, i32x16(LOW)), i32x16(np.int32(4)))
    high = shift_left(and_i32(above, i32x16(HIGH)), i32x16(np.int32(2)))
    return add_i32(low_nibbles(packed), low), add_i32(high_nibbles(packed), high)


@njit
def squares(value: Any, factor: Any, code: int) -> Any:
    """What a value adds to the sums that make the scale."""
    y, q = value * factor, np.float32(code) - HALF
    weight = y * y
    return weight * value * q, weight * q * q


@njit(error_model="numpy")
def encode(x: Any, planes: Any, u: int) -> None:
    d = scale(largest_magnitude(x, 32 * u, LARGEST), -HALF)
    factor = inverse(d)
    products, weights = ZERO, ZERO
    for i in range(16):
        a = within(get_f32(x, 32 * u + i), LARGEST)
        b = within(get_f32(x, 32 * u + 16 + i), LARGEST)
        low, high = symmetric_code(a, factor, HALF), symmetric_code(b, factor, HALF)
        of_a, of_b = squares(a, factor, low), squares(b, factor, high)
        products += of_a[0] + of_b[0]
        weights += of_a[1] + of_b[1]
        put_u8(planes[2], 16 * u + i, low & 15 | (high & 15) << 4)
        above = low >> 4 | (high >> 4) << 2
        if i < 8:
            put_u8(planes[1], 8 * u + i, above)
        else:
            put_u8(planes[1], 8 * u + i - 8, get_u8(planes[1], 8 * u + i - 8) | above << 4)
    put_half(planes[0], u, within(products / weights, LIMIT) if weights > ZERO else d)
