"""q2_1: two bits; planes d, m, qs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.shared.cpu.low_bits import (
    put_two_bits,
    put_two_codes,
    two_bit_quads,
    two_bits,
)
from localkv.quant_formats.shared.cpu.rounding import affine_code, affine_scale, inverse, put_half
from localkv.simd.arithmetic import to_f32
from localkv.simd.memory import get_f32, get_u8


@njit
def decode(planes: Any, u: int) -> Any:
    low, high = two_bits(planes[2], u)
    return to_f32(low), to_f32(high)


@njit
def quads(planes: Any, u: int) -> Any:
    return two_bit_quads(planes[2], u)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    last = np.float32(3)
    d, m = affine_scale(x, 32 * u, last)
    factor = inverse(d)
    put_half(planes[0], u, d)
    put_half(planes[1], u, m)
    for i in range(16):
        low = affine_code(get_f32(x, 32 * u + i), m, factor, last)
        high = affine_code(get_f32(x, 32 * u + 16 + i), m, factor, last)
        put_two_codes(planes[2], u, i, low, high)


@njit
def pack(codes: Any, planes: Any, u: int) -> None:
    for i in range(32):
        put_two_bits(planes[2], u, i, get_u8(codes, 32 * u + i))


q2_1c = SimpleNamespace(decode=decode, quads=quads, pack=pack)
