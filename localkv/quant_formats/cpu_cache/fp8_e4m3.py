"""fp8_e4m3: by way of half precision, whose exponent is one bit wider."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.simd.memory import load_e4m3

BLOCK = 16
SCALED = False
AFFINE = False


@njit
def decode(planes: Any, u: int) -> Any:
    return (load_e4m3(planes[0], u * 16),)
