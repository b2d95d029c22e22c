"""q4_0: nibbles less 8; planes d, qs.

As a weight: nibbles less 8, and a scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.q4_0 import LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, nibble_codes
from localkv.quant_formats.shared.cpu.rounding import (
    inverse,
    largest_magnitude,
    put_half,
    scale,
    symmetric_code,
)
from localkv.simd.integer import high_nibbles, load_nibbles_from_table, low_nibbles
from localkv.simd.memory import get_f32, put_u8
from localkv.simd.quads import load_quads

CODES = tuple(range(-8, 8))


@njit
def decode(planes: Any, u: int) -> Any:
    return load_nibbles_from_table(planes[1], u * 16, CODES)


@njit
def quads(planes: Any, u: int) -> Any:
    packed = load_quads(planes[1], u * 16)
    return low_nibbles(packed), high_nibbles(packed)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    half = np.float32(8)
    d = scale(largest_magnitude(x, 32 * u), -half)
    factor = inverse(d)
    put_half(planes[0], u, d)
    for i in range(16):
        low = symmetric_code(get_f32(x, 32 * u + i), factor, half)
        high = symmetric_code(get_f32(x, 32 * u + 16 + i), factor, half)
        put_u8(planes[1], 16 * u + i, low | high << 4)


PANELS = PanelFormat(LAYOUT, nibble_codes, zero=8)
