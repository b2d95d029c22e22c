"""nuq2: codes of 2 bits that select from a codebook; planes d, o, qs, and the codebook."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.formats.cpu.codebook_rows import encode_block
from localkv.formats.cpu.low_bits import two_bits
from localkv.simd.float_tables import look_up_f32


@njit
def decode(planes: Any, u: int) -> Any:
    low, high = two_bits(planes[2], u)
    return look_up_f32(planes[4], low), look_up_f32(planes[4], high)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    encode_block(x, planes, u, 4)
