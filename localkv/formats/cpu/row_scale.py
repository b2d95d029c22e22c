"""The fp16 scale of a whole row: `formats/row_scale.py`, bit for bit (but for a NaN's payload)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.formats.cpu.rounding import ZERO, half_bits
from localkv.simd.arithmetic import bits_float
from localkv.simd.memory import get_f32, put_u16

SMALLEST, LARGEST = np.float32(2.0**-24), np.float32(65504)
NAN = np.float32(np.nan)


@njit
def half_value(bits: int) -> Any:
    """A positive finite number of half precision."""
    if bits < 1 << 10:
        return np.float32(bits) * SMALLEST
    return bits_float((bits << 13) + (112 << 23))


@njit(error_model="numpy")
def put_row_scale(x: Any, n: int, largest: Any, plane: Any) -> Any:
    """Store the scale of n floats, and return it as a float."""
    top = ZERO
    for i in range(n):
        size = abs(get_f32(x, i))
        top = size if size > top or size != size else top
        if top != top:
            put_u16(plane, 0, 0x7E00)
            return NAN
    exact = min(max(top / largest, SMALLEST), LARGEST)
    bits = half_bits(exact)
    # of positive numbers the next larger one has the next larger bits
    if half_value(bits) < exact:
        bits += 1
    put_u16(plane, 0, bits)
    return half_value(bits)
