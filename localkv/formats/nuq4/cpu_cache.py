"""nuq4: nibbles that select from a codebook; planes d, o, qs, and the codebook."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.formats.cpu.codebook_rows import encode_block
from localkv.formats.nuq4.cpu import OFFSET
from localkv.simd.float_tables import look_up_f32
from localkv.simd.integer import high_nibble, high_nibbles, low_nibble, low_nibbles
from localkv.simd.memory import load_u8
from localkv.simd.quad_tables import byte_table, look_up_quad
from localkv.simd.quads import load_quads


@njit
def decode(planes: Any, u: int) -> Any:
    packed, codebook = load_u8(planes[2], u * 16), planes[4]
    low = look_up_f32(codebook, low_nibble(packed))
    return low, look_up_f32(codebook, high_nibble(packed))


@njit
def numbers(codebook: Any) -> Any:
    return byte_table(codebook, OFFSET)


@njit
def quads(planes: Any, u: int) -> Any:
    packed, table = load_quads(planes[2], u * 16), planes[4]
    return look_up_quad(low_nibbles(packed), table), look_up_quad(high_nibbles(packed), table)


@njit
def encode(x: Any, planes: Any, u: int) -> None:
    encode_block(x, planes, u, 16)
