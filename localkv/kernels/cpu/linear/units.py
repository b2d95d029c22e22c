"""Units of a field of 16 blocks, in the order of panels (`formats/cpu/panel_layout.py`)."""

from __future__ import annotations

import numpy as np
from numba import njit

from localkv.formats.cpu.panel_layout import FLIP_SIGNS, LANES, SPREAD_BITS
from localkv.simd.kinds import Address, Builder, Value
from localkv.simd.memory import (
    get_i32,
    get_u8,
    get_u16,
    load_i32,
    put_i32,
    put_u8,
    put_u16,
    store_i32,
)
from localkv.simd.transpose import transpose_words
from localkv.simd.vector import I32x16, constant, i32, lanewise

SIGN_BITS = np.int32(-0x7F7F7F80)  # 0x80808080


def _spread_bits(builder: Builder, words: Value) -> Value:
    out = constant(i32, 0)
    for byte in range(4):
        bits = builder.lshr(words, constant(i32, byte))
        bits = builder.and_(bits, constant(i32, 0x11111111))
        # neighbours move together: pairs of bits, fours, all eight
        for shift, mask in ((3, 0x03030303), (6, 0x000F000F), (12, 0xFF)):
            bits = builder.or_(bits, builder.lshr(bits, constant(i32, shift)))
            bits = builder.and_(bits, constant(i32, mask))
        out = builder.or_(out, builder.shl(bits, constant(i32, 8 * byte)))
    return out


spread_bits = lanewise(_spread_bits, [I32x16], I32x16)
"""Bit 4 j + b of each lane moves to 8 b + j."""


@njit
def put_units(
    rows: Address, row_bytes: int, n_lanes: int, goal: Address, n_units: int, unit: int, change: int
) -> None:
    """A field of one block of each row: unit 0 of all rows, then unit 1, ..."""
    flip = SIGN_BITS if change == FLIP_SIGNS else np.int32(0)
    done = 0
    if unit == 4 and n_lanes == LANES:
        while done + 4 <= n_units:
            transpose_words(rows + 4 * done, row_bytes, goal + 4 * LANES * done, flip)
            done += 4
    for i in range(done, n_units):
        for lane in range(n_lanes):
            row, to = rows + lane * row_bytes, goal + LANES * unit * i
            if unit == 1:
                put_u8(to, lane, get_u8(row, i))
            elif unit == 2:
                put_u16(to, lane, get_u16(row, i))
            else:
                put_i32(to, lane, get_i32(row, i) ^ flip)
    if change == SPREAD_BITS:
        for i in range(n_units):
            store_i32(goal, LANES * i, spread_bits(load_i32(goal, LANES * i)))
