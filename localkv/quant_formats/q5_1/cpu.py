"""q5_1: nibbles with a fifth bit; planes d, m, qh, qs.

As a weight: five bits, a scale and a minimum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.q5_1 import LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, block_minimum, five_bit_codes
from localkv.quant_formats.shared.cpu.rounding import affine_code, affine_scale, inverse, put_half
from localkv.simd.arithmetic import i32x16, select_i32, to_f32
from localkv.simd.integer import add_i32, high_nibble, low_nibble
from localkv.simd.memory import get_f32, load_mask, load_u8, put_i32, put_u8
from localkv.simd.quads import load_quads_of_five_bits


@njit
def decode(planes: Any, u: int) -> Any:
    packed = load_u8(planes[3], u * 16)
    set_, clear = i32x16(np.int32(16)), i32x16(np.int32(0))
    low = select_i32(load_mask(planes[2], u * 2), set_, clear)
    high = select_i32(load_mask(planes[2], u * 2 + 1), set_, clear)
    low, high = add_i32(low_nibble(packed), low), add_i32(high_nibble(packed), high)
    return to_f32(low), to_f32(high)


@njit
def quads(planes: Any, u: int) -> Any:
    return load_quads_of_five_bits(planes[3], u * 16, planes[2], u * 2)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    last = np.float32(31)
    d, m = affine_scale(x, 32 * u, last)
    factor = inverse(d)
    put_half(planes[0], u, d)
    put_half(planes[1], u, m)
    fifth = 0
    for i in range(16):
        low = affine_code(get_f32(x, 32 * u + i), m, factor, last)
        high = affine_code(get_f32(x, 32 * u + 16 + i), m, factor, last)
        fifth |= (low >> 4) << i | (high >> 4) << (i + 16)
        put_u8(planes[3], 16 * u + i, low & 15 | (high & 15) << 4)
    put_i32(planes[2], u, fifth)


PANELS = PanelFormat(LAYOUT, five_bit_codes, minimum=block_minimum)
