"""q4_1: nibbles; planes d, m, qs."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.simd.arithmetic import to_f32
from localkv.simd.integer import high_nibble, low_nibble
from localkv.simd.memory import load_u8

BLOCK = 32
SCALED = True
AFFINE = True


@njit
def decode(planes: Any, u: int) -> Any:
    packed = load_u8(planes[2], u * 16)
    return to_f32(low_nibble(packed)), to_f32(high_nibble(packed))
