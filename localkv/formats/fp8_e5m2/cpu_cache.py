"""fp8_e5m2: the upper byte of a half."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.formats.cpu.rounding import float8_bits
from localkv.simd.memory import get_f32, load_e5m2, put_u8

LARGEST = np.float32(57344)


@njit
def decode(planes: Any, u: int) -> Any:
    return (load_e5m2(planes[0], u * 16),)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    for i in range(16 * u, 16 * u + 16):
        put_u8(planes[0], i, float8_bits(get_f32(x, i), 2, 15, LARGEST))
