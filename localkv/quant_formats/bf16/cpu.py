"""bf16: the upper half of a float.

As a weight: rows as in the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.simd.memory import get_i32, load_bf16, put_u16
from localkv.simd.vector import constant, f32, i16, i32, lanes_of


@njit
def decode(planes: Any, u: int) -> Any:
    return (load_bf16(planes[0], u * 16),)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    for i in range(16 * u, 16 * u + 16):
        bits = np.int64(get_i32(x, i)) & 0xFFFFFFFF
        if bits & 0x7FFFFFFF > 0x7F800000:
            put_u16(planes[0], i, 0x7FC0)
        else:
            put_u16(planes[0], i, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def load_values(b: Any, address: Any) -> Any:
    """16 values of a row as <16 x float>, at an i8*."""
    bits = b.load(b.bitcast(address, lanes_of(i16).as_pointer()), align=1)
    return b.bitcast(b.shl(b.zext(bits, lanes_of(i32)), constant(i32, 16)), lanes_of(f32))
