"""fp8_e5m2: the upper byte of a half."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.simd.memory import load_e5m2

BLOCK = 16
SCALED = False
AFFINE = False


@njit
def decode(planes: Any, u: int) -> Any:
    return (load_e5m2(planes[0], u * 16),)
