"""Four-bit integers on a CPU; planes d, m of types with minima, qs, and of q4_t qs, d, m."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats import q4
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, block_minimum, nibble_codes
from localkv.quant_formats.shared.cpu.rounding import (
    affine_code,
    affine_scale,
    inverse,
    put_affine_scale,
    put_half,
    put_symmetric_scale,
    symmetric_code,
)
from localkv.simd.integer import high_nibbles, load_nibbles_from_table, low_nibbles
from localkv.simd.memory import get_f32, get_u8, put_u8
from localkv.simd.quads import load_quads

SIGNED, UNSIGNED = tuple(range(-8, 8)), tuple(range(16))
HALF, LAST = np.float32(8), np.float32(15)


@njit
def nibble_quads(qs: Any, u: int) -> Any:
    packed = load_quads(qs, u * 16)
    return low_nibbles(packed), high_nibbles(packed)


@njit
def put_affine_codes(x: Any, qs: Any, u: int, m: Any, factor: Any) -> None:
    for i in range(16):
        low = affine_code(get_f32(x, 32 * u + i), m, factor, LAST)
        high = affine_code(get_f32(x, 32 * u + 16 + i), m, factor, LAST)
        put_u8(qs, 16 * u + i, low | high << 4)


@njit
def decode_q4_0(planes: Any, u: int) -> Any:
    return load_nibbles_from_table(planes[1], u * 16, SIGNED)


@njit
def quads_q4_0(planes: Any, u: int) -> Any:
    return nibble_quads(planes[1], u)


@njit
def encode_q4_0(x: Any, planes: Any, u: int) -> None:
    factor = put_symmetric_scale(x, planes, u, HALF)
    for i in range(16):
        low = symmetric_code(get_f32(x, 32 * u + i), factor, HALF)
        high = symmetric_code(get_f32(x, 32 * u + 16 + i), factor, HALF)
        put_u8(planes[1], 16 * u + i, low | high << 4)


@njit
def decode_q4_1(planes: Any, u: int) -> Any:
    return load_nibbles_from_table(planes[2], u * 16, UNSIGNED)


@njit
def quads_q4_1(planes: Any, u: int) -> Any:
    return nibble_quads(planes[2], u)


@njit
def encode_q4_1(x: Any, planes: Any, u: int) -> None:
    factor, m = put_affine_scale(x, planes, u, LAST)
    put_affine_codes(x, planes[2], u, m, factor)


@njit
def pack_q4_1c(codes: Any, planes: Any, u: int) -> None:
    for i in range(16):
        low, high = get_u8(codes, 32 * u + i), get_u8(codes, 32 * u + 16 + i)
        put_u8(planes[2], 16 * u + i, low | high << 4)


@njit
def decode_q4_t(planes: Any, u: int) -> Any:
    return load_nibbles_from_table(planes[0], u * 16, UNSIGNED)


@njit
def quads_q4_t(planes: Any, u: int) -> Any:
    return nibble_quads(planes[0], u)


@njit
def start_row_q4_t(x: Any, planes: Any, n: int) -> Any:
    d, m = affine_scale(x, 0, LAST, n)
    put_half(planes[1], 0, d)
    put_half(planes[2], 0, m)
    return inverse(d), m


@njit
def encode_q4_t(x: Any, planes: Any, u: int, of_row: Any) -> None:
    factor, m = of_row
    put_affine_codes(x, planes[0], u, m, factor)


q4_0 = SimpleNamespace(
    decode=decode_q4_0,
    quads=quads_q4_0,
    encode=encode_q4_0,
    PANELS=PanelFormat(q4.q4_0.LAYOUT, nibble_codes, zero=8),
)
q4_1 = SimpleNamespace(
    decode=decode_q4_1,
    quads=quads_q4_1,
    encode=encode_q4_1,
    PANELS=PanelFormat(q4.q4_1.LAYOUT, nibble_codes, minimum=block_minimum),
)
q4_1c = SimpleNamespace(decode=decode_q4_1, quads=quads_q4_1, pack=pack_q4_1c)
q4_1c128 = q4_1c
q4_t = SimpleNamespace(
    decode=decode_q4_t, quads=quads_q4_t, start_row=start_row_q4_t, encode=encode_q4_t
)
