"""q4_1c: codes of q4_1; planes d, m, qs."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.formats.q4_1.cpu_cache import decode, quads
from localkv.simd.memory import get_u8, put_u8


@njit
def pack(codes: Any, planes: Any, u: int) -> None:
    for i in range(16):
        low, high = get_u8(codes, 32 * u + i), get_u8(codes, 32 * u + 16 + i)
        put_u8(planes[2], 16 * u + i, low | high << 4)


__all__ = ["decode", "pack", "quads"]
