"""q4_t: nibbles; planes qs, d, m."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.shared.cpu.rounding import affine_code, affine_scale, inverse, put_half
from localkv.simd.integer import high_nibbles, load_nibbles_from_table, low_nibbles
from localkv.simd.memory import get_f32, put_u8
from localkv.simd.quads import load_quads

CODES = tuple(range(16))
LAST = np.float32(15)


@njit
def decode(planes: Any, u: int) -> Any:
    return load_nibbles_from_table(planes[0], u * 16, CODES)


@njit
def quads(planes: Any, u: int) -> Any:
    packed = load_quads(planes[0], u * 16)
    return low_nibbles(packed), high_nibbles(packed)


@njit
def start_row(x: Any, planes: Any, n: int) -> Any:
    d, m = affine_scale(x, 0, LAST, n)
    put_half(planes[1], 0, d)
    put_half(planes[2], 0, m)
    return inverse(d), m


@njit
def encode(x: Any, planes: Any, u: int, of_row: Any) -> None:
    factor, m = of_row
    for i in range(16):
        low = affine_code(get_f32(x, 32 * u + i), m, factor, LAST)
        high = affine_code(get_f32(x, 32 * u + 16 + i), m, factor, LAST)
        put_u8(planes[0], 16 * u + i, low | high << 4)
