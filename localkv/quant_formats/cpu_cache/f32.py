"""f32: 4 bytes a value."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.simd.memory import load_f32

BLOCK = 16
SCALED = False
AFFINE = False


@njit
def decode(planes: Any, u: int) -> Any:
    return (load_f32(planes[0], u * 16),)
