"""Codes of two and of three bits in pages, where types of the cache share them.

A nibble has the codes of values i and i + 16 (`bits.two_bit_codes`); the third bit of value
i is bit i of a plane of its own, as the fifth bit of q5_0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.simd.arithmetic import i32x16, select_i32
from localkv.simd.integer import add_i32, and_i32, shift_left, shift_right
from localkv.simd.memory import get_u8, load_mask, load_nibbles, put_u8
from localkv.simd.quads import load_quads_of_nibbles, or_bits

LOW, SHIFT = np.int32(3), np.int32(2)
LOW_OF_BYTES, TWICE_LOW_OF_BYTES = np.int32(0x03030303), np.int32(0x06060606)
THIRD = 4


@njit
def two_bits(qs: Any, u: int) -> Any:
    """Codes of unit u, values i and values i + 16: an I32x16 each."""
    packed = load_nibbles(qs, u * 8)
    return and_i32(packed, i32x16(LOW)), shift_right(packed, i32x16(SHIFT))


@njit
def three_bits(qs: Any, qh: Any, u: int) -> Any:
    """Codes of unit u with a third bit."""
    low, high = two_bits(qs, u)
    set_, clear = i32x16(np.int32(THIRD)), i32x16(np.int32(0))
    third_low = select_i32(load_mask(qh, u * 2), set_, clear)
    third_high = select_i32(load_mask(qh, u * 2 + 1), set_, clear)
    return add_i32(low, third_low), add_i32(high, third_high)


@njit
def two_bit_quads(qs: Any, u: int) -> Any:
    """Codes of units u to u + 3 as bytes (see `simd/quads.py`)."""
    packed, mask = load_quads_of_nibbles(qs, u * 8), i32x16(LOW_OF_BYTES)
    return and_i32(packed, mask), and_i32(shift_right(packed, i32x16(SHIFT)), mask)


@njit
def three_bit_quads(qs: Any, qh: Any, u: int) -> Any:
    """Codes of units u to u + 3 with a third bit."""
    return or_bits(two_bit_quads(qs, u), qh, u * 2, THIRD)


@njit
def twice_two_bit_quads(qs: Any, u: int) -> Any:
    """Twice the codes of `two_bit_quads`."""
    packed, mask = load_quads_of_nibbles(qs, u * 8), i32x16(TWICE_LOW_OF_BYTES)
    one = i32x16(np.int32(1))
    return and_i32(shift_left(packed, one), mask), and_i32(shift_right(packed, one), mask)


@njit
def put_two_bits(qs: Any, u: int, i: int, code: int) -> None:
    """Put code i of block u of a row, after those before it."""
    at, shift = 8 * u + i % 8, (i // 16 + i // 8 % 2 * 2) * 2
    others = 0 if i < 8 else get_u8(qs, at)
    put_u8(qs, at, others | code << shift)


@njit
def put_two_codes(qs: Any, u: int, i: int, low: int, high: int) -> None:
    """Put codes i and i + 16 of block u of a row, after those before them."""
    nibble, at = low | high << 2, 8 * u + i % 8
    put_u8(qs, at, nibble if i < 8 else get_u8(qs, at) | nibble << 4)
