"""q4_0: nibbles less 8; planes d, qs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.simd.arithmetic import i32x16, to_f32
from localkv.simd.integer import high_nibble, low_nibble, sub_i32
from localkv.simd.memory import load_u8

BLOCK = 32
SCALED = True
AFFINE = False


@njit
def decode(planes: Any, u: int) -> Any:
    packed = load_u8(planes[1], u * 16)
    eight = i32x16(np.int32(8))
    low, high = low_nibble(packed), high_nibble(packed)
    return to_f32(sub_i32(low, eight)), to_f32(sub_i32(high, eight))
