"""q3_0: two bits with a third one, less 4; planes d, qh, qs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.shared.cpu.low_bits import put_two_codes, three_bit_quads, three_bits
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
from localkv.simd.integer import add_i32
from localkv.simd.memory import get_f32, put_i32

HALF = np.float32(4)
LARGEST = np.float32(4 * 65519.99609375)


@njit
def decode(planes: Any, u: int) -> Any:
    low, high = three_bits(planes[2], planes[1], u)
    less = i32x16(np.int32(-4))
    return to_f32(add_i32(low, less)), to_f32(add_i32(high, less))


@njit
def quads(planes: Any, u: int) -> Any:
    return three_bit_quads(planes[2], planes[1], u)


@njit(error_model="numpy")
def encode(x: Any, planes: Any, u: int) -> None:
    d = scale(largest_magnitude(x, 32 * u, LARGEST), -HALF)
    factor = inverse(d)
    products, squares = ZERO, ZERO
    third = 0
    for i in range(16):
        a = within(get_f32(x, 32 * u + i), LARGEST)
        b = within(get_f32(x, 32 * u + 16 + i), LARGEST)
        low, high = symmetric_code(a, factor, HALF), symmetric_code(b, factor, HALF)
        p, q = np.float32(low) - HALF, np.float32(high) - HALF
        products += a * p + b * q
        squares += p * p + q * q
        third |= (low >> 2) << i | (high >> 2) << (i + 16)
        put_two_codes(planes[2], u, i, low & 3, high & 3)
    put_i32(planes[1], u, third)
    put_half(planes[0], u, within(products / squares, LIMIT) if squares > ZERO else d)
