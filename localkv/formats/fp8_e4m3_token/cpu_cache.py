"""fp8_e4m3_token: fp8_e4m3; the kernel applies d. Planes values, d."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.formats.cpu.rounding import float8_bits
from localkv.formats.cpu.row_scale import put_row_scale
from localkv.formats.fp8_e4m3.cpu_cache import LARGEST, decode
from localkv.simd.memory import get_f32, put_u8

__all__ = ["decode"]


@njit
def start_row(x: Any, planes: Any, n: int) -> Any:
    return put_row_scale(x, n, LARGEST, planes[1])


@njit(error_model="numpy")
def encode(x: Any, planes: Any, u: int, d: Any) -> None:
    for i in range(16 * u, 16 * u + 16):
        put_u8(planes[0], i, float8_bits(get_f32(x, i) / d, 3, 7, LARGEST))
