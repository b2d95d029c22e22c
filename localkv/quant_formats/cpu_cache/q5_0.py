"""q5_0: nibbles with a fifth bit, less 16; planes d, qh, qs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.simd.arithmetic import i32x16, select_i32, to_f32
from localkv.simd.integer import add_i32, high_nibble, low_nibble
from localkv.simd.memory import load_mask, load_u8

BLOCK = 32
SCALED = True
AFFINE = False


@njit
def decode(planes: Any, u: int) -> Any:
    packed = load_u8(planes[2], u * 16)
    set_, clear = i32x16(np.int32(0)), i32x16(np.int32(-16))  # 16 * bit - 16
    low = select_i32(load_mask(planes[1], u * 2), set_, clear)
    high = select_i32(load_mask(planes[1], u * 2 + 1), set_, clear)
    low, high = add_i32(low_nibble(packed), low), add_i32(high_nibble(packed), high)
    return to_f32(low), to_f32(high)
