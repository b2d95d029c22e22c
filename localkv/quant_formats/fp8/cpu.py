"""8-bit floats by way of half precision: e4m3's exponent is one bit shorter, e5m2 is a half's upper
byte. Planes values and, with a scale per row, which the kernel applies, d.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.fp8 import E4M3_LARGEST, E5M2_LARGEST
from localkv.quant_formats.shared.cpu.rounding import float8_bits, put_row_scale
from localkv.simd.memory import get_f32, load_e4m3, load_e5m2, put_u8

LARGEST_E4M3, LARGEST_E5M2 = np.float32(E4M3_LARGEST), np.float32(E5M2_LARGEST)


@njit
def decode_e4m3(planes: Any, u: int) -> Any:
    return (load_e4m3(planes[0], u * 16),)


@njit
def decode_e5m2(planes: Any, u: int) -> Any:
    return (load_e5m2(planes[0], u * 16),)


@njit
def encode_e4m3(x: Any, planes: Any, u: int) -> None:
    for i in range(16 * u, 16 * u + 16):
        put_u8(planes[0], i, float8_bits(get_f32(x, i), 3, 7, LARGEST_E4M3))


@njit
def encode_e5m2(x: Any, planes: Any, u: int) -> None:
    for i in range(16 * u, 16 * u + 16):
        put_u8(planes[0], i, float8_bits(get_f32(x, i), 2, 15, LARGEST_E5M2))


@njit
def start_e4m3(x: Any, planes: Any, n: int) -> Any:
    return put_row_scale(x, n, LARGEST_E4M3, planes[1])


@njit
def start_e5m2(x: Any, planes: Any, n: int) -> Any:
    return put_row_scale(x, n, LARGEST_E5M2, planes[1])


@njit(error_model="numpy")
def encode_scaled_e4m3(x: Any, planes: Any, u: int, d: Any) -> None:
    for i in range(16 * u, 16 * u + 16):
        put_u8(planes[0], i, float8_bits(get_f32(x, i) / d, 3, 7, LARGEST_E4M3))


@njit(error_model="numpy")
def encode_scaled_e5m2(x: Any, planes: Any, u: int, d: Any) -> None:
    for i in range(16 * u, 16 * u + 16):
        put_u8(planes[0], i, float8_bits(get_f32(x, i) / d, 2, 15, LARGEST_E5M2))


fp8_e4m3 = SimpleNamespace(decode=decode_e4m3, encode=encode_e4m3)
fp8_e5m2 = SimpleNamespace(decode=decode_e5m2, encode=encode_e5m2)
fp8_e4m3_token = SimpleNamespace(
    decode=decode_e4m3, start_row=start_e4m3, encode=encode_scaled_e4m3
)
fp8_e5m2_token = SimpleNamespace(
    decode=decode_e5m2, start_row=start_e5m2, encode=encode_scaled_e5m2
)
