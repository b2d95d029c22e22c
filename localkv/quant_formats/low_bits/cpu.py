"""Integers of two and three bits in pages on a CPU.

A nibble has the codes of values i and i + 16 (`bits.two_bit_codes`). The third bit of value i is
bit i of a plane of its own, as the fifth bit of q5_0. Planes are d, m of types with minima, qh of
three bits, and qs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats import low_bits
from localkv.quant_formats.shared.cpu.rounding import (
    HALF,
    LIMIT,
    ZERO,
    affine_code,
    inverse,
    largest_magnitude,
    put_affine_scale,
    put_half,
    scale,
    symmetric_code,
    truncated,
    within,
)
from localkv.simd.arithmetic import i32x16, select_i32, to_f32
from localkv.simd.integer import add_i32, and_i32, shift_left, shift_right
from localkv.simd.memory import get_f32, get_u8, load_mask, load_nibbles, put_i32, put_u8
from localkv.simd.quads import load_quads_of_nibbles, or_bits

LOW, SHIFT = np.int32(3), np.int32(2)
LOW_OF_BYTES, TWICE_LOW_OF_BYTES = np.int32(0x03030303), np.int32(0x06060606)
THIRD = 4
TWO, THREE, FOUR = np.float32(2), np.float32(3), np.float32(4)
REACH = np.float32(low_bits.REACH)
LARGEST_Q2, LARGEST_Q3 = THREE * LIMIT, FOUR * LIMIT


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


@njit
def decode_kv3_1(planes: Any, u: int) -> Any:
    low, high = three_bits(planes[3], planes[2], u)
    return to_f32(low), to_f32(high)


@njit
def quads_kv3_1(planes: Any, u: int) -> Any:
    return three_bit_quads(planes[3], planes[2], u)


@njit
def encode_kv3_1(x: Any, planes: Any, u: int) -> None:
    last = np.float32(7)
    factor, m = put_affine_scale(x, planes, u, last)
    third = 0
    for i in range(16):
        low = affine_code(get_f32(x, 32 * u + i), m, factor, last)
        high = affine_code(get_f32(x, 32 * u + 16 + i), m, factor, last)
        third |= (low >> 2) << i | (high >> 2) << (i + 16)
        put_two_codes(planes[3], u, i, low & 3, high & 3)
    put_i32(planes[2], u, third)


@njit
def pack_kv3_1c(codes: Any, planes: Any, u: int) -> None:
    third = 0
    for i in range(32):
        code = get_u8(codes, 32 * u + i)
        third |= (code >> 2) << i
        put_two_bits(planes[3], u, i, code & 3)
    put_i32(planes[2], u, third)


@njit
def decode_kv3_0(planes: Any, u: int) -> Any:
    low, high = three_bits(planes[2], planes[1], u)
    less = i32x16(np.int32(-4))
    return to_f32(add_i32(low, less)), to_f32(add_i32(high, less))


@njit
def quads_kv3_0(planes: Any, u: int) -> Any:
    return three_bit_quads(planes[2], planes[1], u)


@njit(error_model="numpy")
def encode_kv3_0(x: Any, planes: Any, u: int) -> None:
    d = scale(largest_magnitude(x, 32 * u, LARGEST_Q3), -FOUR)
    factor = inverse(d)
    products, squares = ZERO, ZERO
    third = 0
    for i in range(16):
        a = within(get_f32(x, 32 * u + i), LARGEST_Q3)
        b = within(get_f32(x, 32 * u + 16 + i), LARGEST_Q3)
        low, high = symmetric_code(a, factor, FOUR), symmetric_code(b, factor, FOUR)
        p, q = np.float32(low) - FOUR, np.float32(high) - FOUR
        products += a * p + b * q
        squares += p * p + q * q
        third |= (low >> 2) << i | (high >> 2) << (i + 16)
        put_two_codes(planes[2], u, i, low & 3, high & 3)
    put_i32(planes[1], u, third)
    put_half(planes[0], u, within(products / squares, LIMIT) if squares > ZERO else d)


@njit
def decode_kv2_1(planes: Any, u: int) -> Any:
    low, high = two_bits(planes[2], u)
    return to_f32(low), to_f32(high)


@njit
def quads_kv2_1(planes: Any, u: int) -> Any:
    return two_bit_quads(planes[2], u)


@njit
def encode_kv2_1(x: Any, planes: Any, u: int) -> None:
    last = np.float32(3)
    factor, m = put_affine_scale(x, planes, u, last)
    for i in range(16):
        low = affine_code(get_f32(x, 32 * u + i), m, factor, last)
        high = affine_code(get_f32(x, 32 * u + 16 + i), m, factor, last)
        put_two_codes(planes[2], u, i, low, high)


@njit
def pack_kv2_1c(codes: Any, planes: Any, u: int) -> None:
    for i in range(32):
        put_two_bits(planes[2], u, i, get_u8(codes, 32 * u + i))


@njit
def decode_kv2_0(planes: Any, u: int) -> Any:
    low, high = two_bits(planes[1], u)
    less = i32x16(np.int32(-3))
    low, high = add_i32(add_i32(low, low), less), add_i32(add_i32(high, high), less)
    return to_f32(low), to_f32(high)


@njit
def quads_kv2_0(planes: Any, u: int) -> Any:
    return twice_two_bit_quads(planes[1], u)


@njit
def q2_code(value: Any, factor: Any) -> Any:
    return truncated(value * factor * HALF + TWO, ZERO, THREE)


@njit(error_model="numpy")
def encode_kv2_0(x: Any, planes: Any, u: int) -> None:
    factor = inverse(scale(abs(largest_magnitude(x, 32 * u, LARGEST_Q2)), REACH))
    products, squares = ZERO, ZERO
    for i in range(16):
        a = within(get_f32(x, 32 * u + i), LARGEST_Q2)
        b = within(get_f32(x, 32 * u + 16 + i), LARGEST_Q2)
        low, high = q2_code(a, factor), q2_code(b, factor)
        p, q = TWO * np.float32(low) - THREE, TWO * np.float32(high) - THREE
        products += a * p + b * q
        squares += p * p + q * q
        put_two_codes(planes[1], u, i, low, high)
    put_half(planes[0], u, within(products / squares, LIMIT))


kv3_1 = SimpleNamespace(decode=decode_kv3_1, quads=quads_kv3_1, encode=encode_kv3_1)
kv3_1c = SimpleNamespace(decode=decode_kv3_1, quads=quads_kv3_1, pack=pack_kv3_1c)
kv3_1c128 = kv3_1c
kv3_0 = SimpleNamespace(decode=decode_kv3_0, quads=quads_kv3_0, encode=encode_kv3_0)
kv2_1 = SimpleNamespace(decode=decode_kv2_1, quads=quads_kv2_1, encode=encode_kv2_1)
kv2_1c = SimpleNamespace(decode=decode_kv2_1, quads=quads_kv2_1, pack=pack_kv2_1c)
kv2_0 = SimpleNamespace(decode=decode_kv2_0, quads=quads_kv2_0, encode=encode_kv2_0)
