"""The worker that transposes the blocks of matrices into panels (see `linear_panels`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.linear_panels import FLIP_SIGNS, SPREAD_BITS
from localkv.kernels.cpu.panel_bytes import LANES
from localkv.simd.memory import (
    get_i32,
    get_i64,
    get_u8,
    get_u16,
    load_i32,
    put_i32,
    put_u8,
    put_u16,
    store_i32,
    take_next,
)
from localkv.simd.transpose import transpose_words
from localkv.simd.vector import I32x16, constant, i32, lanewise

SIGN_BITS = np.int32(-0x7F7F7F80)  # 0x80808080


def _spread_bits(builder: Any, words: Any) -> Any:
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
    rows: Any, row_bytes: int, n_lanes: int, goal: Any, n_units: int, unit: int, change: int
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


@cfunc("void(int64, int64)", error_model="numpy")
def worker(job: Any, thread: Any) -> None:
    """Fill panels of a matrix, or of a stack of them.

    Items of the job: the counter of panels, panels of all matrices, rows of one, bytes of a row,
    bytes of a block, blocks and bytes of a record, bytes of a panel, planes, and the addresses of
    `PanelLayout.table`, the rows and the panels. Rows and blocks that complete a panel become zero.
    """
    n_panels, n_out, row_bytes = get_i64(job, 1), get_i64(job, 2), get_i64(job, 3)
    block_bytes, record_blocks = get_i64(job, 4), get_i64(job, 5)
    record_bytes, panel_bytes = get_i64(job, 6), get_i64(job, 7)
    n_planes, table = get_i64(job, 8), get_i64(job, 9)
    row_blocks = row_bytes // block_bytes
    matrix_panels = (n_out + LANES - 1) // LANES
    n_records = panel_bytes // record_bytes
    while True:
        panel = take_next(job)
        if panel >= n_panels:
            break
        matrix, in_matrix = panel // matrix_panels, panel % matrix_panels
        rows = get_i64(job, 10) + (matrix * n_out + in_matrix * LANES) * row_bytes
        n_lanes = min(LANES, n_out - in_matrix * LANES)
        out = get_i64(job, 11) + panel * panel_bytes
        cleared = panel_bytes
        if n_lanes < LANES:
            cleared = 0
        elif row_blocks < n_records * record_blocks:
            cleared = (n_records - 1) * record_bytes
        for i in range(cleared, panel_bytes):
            put_u8(out, i, 0)
        for block in range(row_blocks):
            record = out + block // record_blocks * record_bytes
            in_record = block % record_blocks
            for plane in range(n_planes):
                entry = table + 40 * plane
                start = rows + block * block_bytes + get_i64(entry, 0)
                n_units, unit, change = get_i64(entry, 1), get_i64(entry, 2), get_i64(entry, 4)
                goal = record + get_i64(entry, 3) + in_record * n_units * unit * LANES
                put_units(start, row_bytes, n_lanes, goal, n_units, unit, change)
