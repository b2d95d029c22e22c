"""q2_0: twice two bits, less 3; planes d, qs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.shared.cpu.low_bits import put_two_codes, twice_two_bit_quads, two_bits
from localkv.quant_formats.shared.cpu.rounding import (
    HALF,
    LIMIT,
    ZERO,
    inverse,
    largest_magnitude,
    put_half,
    scale,
    truncated,
    within,
)
from localkv.simd.arithmetic import i32x16, to_f32
from localkv.simd.integer import add_i32
from localkv.simd.memory import get_f32

LARGEST = np.float32(3 * 65519.99609375)
REACH, TWO, THREE = np.float32(4.5), np.float32(2), np.float32(3)


@njit
def decode(planes: Any, u: int) -> Any:
    low, high = two_bits(planes[1], u)
    less = i32x16(np.int32(-3))
    low, high = add_i32(add_i32(low, low), less), add_i32(add_i32(high, high), less)
    return to_f32(low), to_f32(high)


@njit
def quads(planes: Any, u: int) -> Any:
    return twice_two_bit_quads(planes[1], u)


@njit
def _code(value: Any, factor: Any) -> Any:
    return truncated(value * factor * HALF + TWO, ZERO, THREE)


@njit(error_model="numpy")
def encode(x: Any, planes: Any, u: int) -> None:
    factor = inverse(scale(abs(largest_magnitude(x, 32 * u, LARGEST)), REACH))
    products, squares = ZERO, ZERO
    for i in range(16):
        a = within(get_f32(x, 32 * u + i), LARGEST)
        b = within(get_f32(x, 32 * u + 16 + i), LARGEST)
        low, high = _code(a, factor), _code(b, factor)
        p, q = TWO * np.float32(low) - THREE, TWO * np.float32(high) - THREE
        products += a * p + b * q
        squares += p * p + q * q
        put_two_codes(planes[1], u, i, low, high)
    put_half(planes[0], u, within(products / squares, LIMIT))
