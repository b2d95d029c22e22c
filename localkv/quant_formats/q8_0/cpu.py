"""Signed bytes on a CPU; planes d, qs, and of q8_t qs, d.

As a weight: bytes with a sign, which become unsigned, and a scale.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.q8_0 import LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import BLOCK_VECTORS, PanelFormat, Record
from localkv.quant_formats.shared.cpu.rounding import (
    inverse,
    largest_magnitude,
    put_half,
    put_row_scale,
    rounded,
    scale,
)
from localkv.simd.arithmetic import i32x16
from localkv.simd.integer import xor_i32
from localkv.simd.memory import get_f32, get_u8, load_i8_as_f32, put_u8
from localkv.simd.quads import load_two_quads

SIGNS = np.int32(-0x7F7F7F80)
"""The highest bit of each byte."""
LARGEST = np.float32(127)


@njit
def decode(planes: Any, u: int) -> Any:
    return load_i8_as_f32(planes[1], u * 32), load_i8_as_f32(planes[1], u * 32 + 16)


@njit
def quads(planes: Any, u: int) -> Any:
    low, high = load_two_quads(planes[1], u * 32)
    return xor_i32(low, i32x16(SIGNS)), xor_i32(high, i32x16(SIGNS))


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    d = scale(abs(largest_magnitude(x, 32 * u)), LARGEST)
    factor = inverse(d)
    put_half(planes[0], u, d)
    for i in range(32 * u, 32 * u + 32):
        put_u8(planes[1], i, rounded(get_f32(x, i) * factor, LARGEST) & 255)


def byte_codes(record: Record, block: int) -> list[Any]:
    return [record.words("qs", BLOCK_VECTORS * block + i) for i in range(BLOCK_VECTORS)]


PANELS = PanelFormat(LAYOUT, byte_codes, zero=128)


@njit
def pack(codes: Any, planes: Any, u: int) -> None:
    for i in range(32 * u, 32 * u + 32):
        put_u8(planes[1], i, get_u8(codes, i))


@njit
def decode_of_row(planes: Any, u: int) -> Any:
    return load_i8_as_f32(planes[0], u * 32), load_i8_as_f32(planes[0], u * 32 + 16)


@njit
def quads_of_row(planes: Any, u: int) -> Any:
    low, high = load_two_quads(planes[0], u * 32)
    return xor_i32(low, i32x16(SIGNS)), xor_i32(high, i32x16(SIGNS))


@njit
def start_row(x: Any, planes: Any, n: int) -> Any:
    return put_row_scale(x, n, LARGEST, planes[1])


@njit(error_model="numpy")
def encode_of_row(x: Any, planes: Any, u: int, d: Any) -> None:
    for i in range(32 * u, 32 * u + 32):
        put_u8(planes[0], i, rounded(get_f32(x, i) / d, LARGEST) & 255)


q8_0c = SimpleNamespace(decode=decode, quads=quads, pack=pack)
q8_t = SimpleNamespace(
    decode=decode_of_row, quads=quads_of_row, start_row=start_row, encode=encode_of_row
)
