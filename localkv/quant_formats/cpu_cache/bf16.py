"""bf16: the upper half of a float."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.simd.memory import load_bf16

BLOCK = 16
SCALED = False
AFFINE = False


@njit
def decode(planes: Any, u: int) -> Any:
    return (load_bf16(planes[0], u * 16),)
