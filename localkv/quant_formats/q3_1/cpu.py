"""q3_1: two bits with a third one; planes d, m, qh, qs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.shared.cpu.low_bits import (
    put_two_bits,
    put_two_codes,
    three_bit_quads,
    three_bits,
)
from localkv.quant_formats.shared.cpu.rounding import affine_code, affine_scale, inverse, put_half
from localkv.simd.arithmetic import to_f32
from localkv.simd.memory import get_f32, get_u8, put_i32


@njit
def decode(planes: Any, u: int) -> Any:
    low, high = three_bits(planes[3], planes[2], u)
    return to_f32(low), to_f32(high)


@njit
def quads(planes: Any, u: int) -> Any:
    return three_bit_quads(planes[3], planes[2], u)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    last = np.float32(7)
    d, m = affine_scale(x, 32 * u, last)
    factor = inverse(d)
    put_half(planes[0], u, d)
    put_half(planes[1], u, m)
    third = 0
    for i in range(16):
        low = affine_code(get_f32(x, 32 * u + i), m, factor, last)
        high = affine_code(get_f32(x, 32 * u + 16 + i), m, factor, last)
        third |= (low >> 2) << i | (high >> 2) << (i + 16)
        put_two_codes(planes[3], u, i, low & 3, high & 3)
    put_i32(planes[2], u, third)


@njit
def pack(codes: Any, planes: Any, u: int) -> None:
    third = 0
    for i in range(32):
        code = get_u8(codes, 32 * u + i)
        third |= (code >> 2) << i
        put_two_bits(planes[3], u, i, code & 3)
    put_i32(planes[2], u, third)


q3_1c = SimpleNamespace(decode=decode, quads=quads, pack=pack)
