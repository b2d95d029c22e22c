"""q3_1c: codes of q3_1; planes d, m, qh, qs."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.formats.cpu.low_bits import put_two_bits
from localkv.formats.q3_1.cpu_cache import decode, quads
from localkv.simd.memory import get_u8, put_i32


@njit
def pack(codes: Any, planes: Any, u: int) -> None:
    third = 0
    for i in range(32):
        code = get_u8(codes, 32 * u + i)
        third |= (code >> 2) << i
        put_two_bits(planes[3], u, i, code & 3)
    put_i32(planes[2], u, third)


__all__ = ["decode", "pack", "quads"]
