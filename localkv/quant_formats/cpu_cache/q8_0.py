"""q8_0: signed bytes; planes d, qs."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.simd.memory import load_i8_as_f32

BLOCK = 32
SCALED = True
AFFINE = False


@njit
def decode(planes: Any, u: int) -> Any:
    return load_i8_as_f32(planes[1], u * 32), load_i8_as_f32(planes[1], u * 32 + 16)
