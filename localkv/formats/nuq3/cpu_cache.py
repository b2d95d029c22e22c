"""nuq3: codes of 3 bits that select from a codebook; planes d, o, qh, qs, and the codebook."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.formats.cpu.codebook_rows import encode_block
from localkv.formats.cpu.low_bits import three_bits
from localkv.formats.nuq3.cpu import OFFSET
from localkv.simd.float_tables import look_up_f32
from localkv.simd.quad_bits import or_bits
from localkv.simd.quad_tables import look_up_of_64, pair_tables
from localkv.simd.quads import load_quads_of_nibbles

THIRD = 16
"""A code's third bit where nibbles are looked up."""


@njit
def decode(planes: Any, u: int) -> Any:
    low, high = three_bits(planes[3], planes[2], u)
    return look_up_f32(planes[4], low), look_up_f32(planes[4], high)


@njit
def numbers(codebook: Any) -> Any:
    return pair_tables(codebook, OFFSET, 8)


@njit
def quads(planes: Any, u: int) -> Any:
    packed = load_quads_of_nibbles(planes[3], u * 8)
    low, high = or_bits((packed, packed), planes[2], u * 2, THIRD)
    return look_up_of_64(low, planes[4][0]), look_up_of_64(high, planes[4][1])


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    encode_block(x, planes, u, 8)
