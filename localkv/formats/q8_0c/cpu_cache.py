"""q8_0c: codes of q8_0; planes d, qs."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.formats.q8_0.cpu_cache import decode, quads
from localkv.simd.memory import get_u8, put_u8


@njit
def pack(codes: Any, planes: Any, u: int) -> None:
    for i in range(32 * u, 32 * u + 32):
        put_u8(planes[1], i, get_u8(codes, i))


__all__ = ["decode", "pack", "quads"]
