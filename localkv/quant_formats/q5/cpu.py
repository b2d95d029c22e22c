"""Five-bit integers on a CPU: nibbles with a fifth bit; planes d, m of q5_1, qh, qs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats import q5
from localkv.quant_formats.shared.cpu.panel_codes import (
    PanelFormat,
    Record,
    block_minimum,
    masked,
    nibble_codes,
)
from localkv.quant_formats.shared.cpu.rounding import (
    affine_code,
    put_affine_scale,
    put_symmetric_scale,
    symmetric_code,
)
from localkv.simd.arithmetic import i32x16, select_i32, to_f32
from localkv.simd.integer import add_i32, high_nibble, low_nibble
from localkv.simd.memory import get_f32, load_mask, load_u8, put_i32, put_u8
from localkv.simd.quads import load_quads_of_five_bits

HALF, LAST = np.float32(16), np.float32(31)


@njit
def five_bits(qs: Any, qh: Any, u: int, with_bit: Any, without: Any) -> Any:
    """Nibbles of unit u, to which one or the other number is added."""
    packed, set_, clear = load_u8(qs, u * 16), i32x16(with_bit), i32x16(without)
    low = select_i32(load_mask(qh, u * 2), set_, clear)
    high = select_i32(load_mask(qh, u * 2 + 1), set_, clear)
    low, high = add_i32(low_nibble(packed), low), add_i32(high_nibble(packed), high)
    return to_f32(low), to_f32(high)


@njit
def decode_q5_0(planes: Any, u: int) -> Any:
    return five_bits(planes[2], planes[1], u, np.int32(0), np.int32(-16))


@njit
def quads_q5_0(planes: Any, u: int) -> Any:
    return load_quads_of_five_bits(planes[2], u * 16, planes[1], u * 2)


@njit
def encode_q5_0(x: Any, planes: Any, u: int) -> None:
    factor = put_symmetric_scale(x, planes, u, HALF)
    fifth = 0
    for i in range(16):
        low = symmetric_code(get_f32(x, 32 * u + i), factor, HALF)
        high = symmetric_code(get_f32(x, 32 * u + 16 + i), factor, HALF)
        fifth |= (low >> 4) << i | (high >> 4) << (i + 16)
        put_u8(planes[2], 16 * u + i, low & 15 | (high & 15) << 4)
    put_i32(planes[1], u, fifth)


@njit
def decode_q5_1(planes: Any, u: int) -> Any:
    return five_bits(planes[3], planes[2], u, np.int32(16), np.int32(0))


@njit
def quads_q5_1(planes: Any, u: int) -> Any:
    return load_quads_of_five_bits(planes[3], u * 16, planes[2], u * 2)


@njit
def encode_q5_1(x: Any, planes: Any, u: int) -> None:
    factor, m = put_affine_scale(x, planes, u, LAST)
    fifth = 0
    for i in range(16):
        low = affine_code(get_f32(x, 32 * u + i), m, factor, LAST)
        high = affine_code(get_f32(x, 32 * u + 16 + i), m, factor, LAST)
        fifth |= (low >> 4) << i | (high >> 4) << (i + 16)
        put_u8(planes[3], 16 * u + i, low & 15 | (high & 15) << 4)
    put_i32(planes[2], u, fifth)


def five_bit_codes(record: Record, block: int) -> list[Any]:
    """Codes of a block of 32."""
    high = record.words("qh", block)
    low = nibble_codes(record, block)
    b = record.builder
    return [b.or_(x, masked(b, high, j - 4, 16)) for j, x in enumerate(low)]


q5_0 = SimpleNamespace(
    decode=decode_q5_0,
    quads=quads_q5_0,
    encode=encode_q5_0,
    PANELS=PanelFormat(q5.q5_0.LAYOUT, five_bit_codes, zero=16),
)
q5_1 = SimpleNamespace(
    decode=decode_q5_1,
    quads=quads_q5_1,
    encode=encode_q5_1,
    PANELS=PanelFormat(q5.q5_1.LAYOUT, five_bit_codes, minimum=block_minimum),
)
