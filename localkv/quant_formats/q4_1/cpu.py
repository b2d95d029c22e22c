"""q4_1: nibbles; planes d, m, qs.

As a weight: nibbles, a scale and a minimum.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.q4_1 import LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, block_minimum, nibble_codes
from localkv.quant_formats.shared.cpu.rounding import affine_code, affine_scale, inverse, put_half
from localkv.simd.integer import high_nibbles, load_nibbles_from_table, low_nibbles
from localkv.simd.memory import get_f32, get_u8, put_u8
from localkv.simd.quads import load_quads

CODES = tuple(range(16))


@njit
def decode(planes: Any, u: int) -> Any:
    return load_nibbles_from_table(planes[2], u * 16, CODES)


@njit
def quads(planes: Any, u: int) -> Any:
    packed = load_quads(planes[2], u * 16)
    return low_nibbles(packed), high_nibbles(packed)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    last = np.float32(15)
    d, m = affine_scale(x, 32 * u, last)
    factor = inverse(d)
    put_half(planes[0], u, d)
    put_half(planes[1], u, m)
    for i in range(16):
        low = affine_code(get_f32(x, 32 * u + i), m, factor, last)
        high = affine_code(get_f32(x, 32 * u + 16 + i), m, factor, last)
        put_u8(planes[2], 16 * u + i, low | high << 4)


PANELS = PanelFormat(LAYOUT, nibble_codes, minimum=block_minimum)


@njit
def pack(codes: Any, planes: Any, u: int) -> None:
    for i in range(16):
        low, high = get_u8(codes, 32 * u + i), get_u8(codes, 32 * u + 16 + i)
        put_u8(planes[2], 16 * u + i, low | high << 4)


q4_1c = SimpleNamespace(decode=decode, quads=quads, pack=pack)
