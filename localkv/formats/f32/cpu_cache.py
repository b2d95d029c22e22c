"""f32: 4 bytes a value."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.simd.memory import get_f32, load_f32, put_f32


@njit
def decode(planes: Any, u: int) -> Any:
    return (load_f32(planes[0], u * 16),)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    for i in range(16 * u, 16 * u + 16):
        put_f32(planes[0], i, get_f32(x, i))
