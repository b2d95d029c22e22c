"""q2_1c: codes of q2_1; planes d, m, qs."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.formats.cpu.low_bits import put_two_bits
from localkv.formats.q2_1.cpu_cache import decode, quads
from localkv.simd.memory import get_u8


@njit
def pack(codes: Any, planes: Any, u: int) -> None:
    for i in range(32):
        put_two_bits(planes[2], u, i, get_u8(codes, 32 * u + i))


__all__ = ["decode", "pack", "quads"]
