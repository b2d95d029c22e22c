"""q5_0: nibbles with a fifth bit, less 16; planes d, qh, qs.

As a weight: five bits less 16, and a scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.q5_0 import LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, five_bit_codes
from localkv.quant_formats.shared.cpu.rounding import (
    inverse,
    largest_magnitude,
    put_half,
    scale,
    symmetric_code,
)
from localkv.simd.arithmetic import i32x16, select_i32, to_f32
from localkv.simd.integer import add_i32, high_nibble, low_nibble
from localkv.simd.memory import get_f32, load_mask, load_u8, put_i32, put_u8
from localkv.simd.quads import load_quads_of_five_bits


@njit
def decode(planes: Any, u: int) -> Any:
    packed = load_u8(planes[2], u * 16)
    set_, clear = i32x16(np.int32(0)), i32x16(np.int32(-16))  # 16 * bit - 16
    low = select_i32(load_mask(planes[1], u * 2), set_, clear)
    high = select_i32(load_mask(planes[1], u * 2 + 1), set_, clear)
    low, high = add_i32(low_nibble(packed), low), add_i32(high_nibble(packed), high)
    return to_f32(low), to_f32(high)


@njit
def quads(planes: Any, u: int) -> Any:
    return load_quads_of_five_bits(planes[2], u * 16, planes[1], u * 2)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    half = np.float32(16)
    d = scale(largest_magnitude(x, 32 * u), -half)
    factor = inverse(d)
    put_half(planes[0], u, d)
    fifth = 0
    for i in range(16):
        low = symmetric_code(get_f32(x, 32 * u + i), factor, half)
        high = symmetric_code(get_f32(x, 32 * u + 16 + i), factor, half)
        fifth |= (low >> 4) << i | (high >> 4) << (i + 16)
        put_u8(planes[2], 16 * u + i, low & 15 | (high & 15) << 4)
    put_i32(planes[1], u, fifth)


PANELS = PanelFormat(LAYOUT, five_bit_codes, zero=16)
