"""q8_t: signed bytes; planes qs, d."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.q8_0.cpu import SIGNS
from localkv.quant_formats.shared.cpu.rounding import put_row_scale, rounded
from localkv.simd.arithmetic import i32x16
from localkv.simd.integer import xor_i32
from localkv.simd.memory import get_f32, load_i8_as_f32, put_u8
from localkv.simd.quads import load_two_quads

LARGEST = np.float32(127)


@njit
def decode(planes: Any, u: int) -> Any:
    return load_i8_as_f32(planes[0], u * 32), load_i8_as_f32(planes[0], u * 32 + 16)


@njit
def quads(planes: Any, u: int) -> Any:
    low, high = load_two_quads(planes[0], u * 32)
    return xor_i32(low, i32x16(SIGNS)), xor_i32(high, i32x16(SIGNS))


@njit
def start_row(x: Any, planes: Any, n: int) -> Any:
    return put_row_scale(x, n, LARGEST, planes[1])


@njit(error_model="numpy")
def encode(x: Any, planes: Any, u: int, d: Any) -> None:
    for i in range(32 * u, 32 * u + 32):
        put_u8(planes[0], i, rounded(get_f32(x, i) / d, LARGEST) & 255)
