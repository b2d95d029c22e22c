"""nuq2: codes of 2 bits that select from a codebook; planes d, o, qs, and the codebook."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.formats.cpu.codebook_rows import encode_block
from localkv.formats.cpu.low_bits import two_bits
from localkv.formats.nuq2.cpu import OFFSET
from localkv.simd.float_tables import look_up_f32
from localkv.simd.quad_tables import look_up_quad, pair_tables
from localkv.simd.quads import load_quads_of_nibbles


@njit
def decode(planes: Any, u: int) -> Any:
    low, high = two_bits(planes[2], u)
    return look_up_f32(planes[4], low), look_up_f32(planes[4], high)


@njit
def numbers(codebook: Any) -> Any:
    return pair_tables(codebook, OFFSET, 4)


@njit
def quads(planes: Any, u: int) -> Any:
    packed, tables = load_quads_of_nibbles(planes[2], u * 8), planes[4]
    return look_up_quad(packed, tables[0]), look_up_quad(packed, tables[1])


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    encode_block(x, planes, u, 4)
