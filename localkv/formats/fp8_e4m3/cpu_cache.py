"""fp8_e4m3: by way of half precision, whose exponent is one bit wider."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.formats.cpu.rounding import float8_bits
from localkv.simd.memory import get_f32, load_e4m3, put_u8

LARGEST = np.float32(448)


@njit
def decode(planes: Any, u: int) -> Any:
    return (load_e4m3(planes[0], u * 16),)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    for i in range(16 * u, 16 * u + 16):
        put_u8(planes[0], i, float8_bits(get_f32(x, i), 3, 7, LARGEST))
