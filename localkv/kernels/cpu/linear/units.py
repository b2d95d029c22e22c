"""Panels of rows (`shared/cpu/panel_layout.py`), and units of a field of 16 blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.kernels.cpu.linear.read_job import read_plane
from localkv.quant_formats.shared.cpu.panel_layout import FLIP_SIGNS, LANES, SPREAD_BITS
from localkv.simd.arithmetic import i32x16
from localkv.simd.atomic import atomic_load
from localkv.simd.integer import xor_i32
from localkv.simd.kinds import Address, Builder, Count, Value
from localkv.simd.memory import (
    get_i32,
    get_u8,
    get_u16,
    load_i32,
    prefetch,
    put_i32,
    put_u8,
    put_u16,
    store_i32,
)
from localkv.simd.transpose import WORD, bytes_apart, load_column, transpose_words
from localkv.simd.vector import I32x16, constant, i32, lanewise

CACHE_LINE, PAGE = 64, 4096
SMALL_BLOCKS = 8
"""Blocks of which one field is laid out after the other, where a record has several blocks."""
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
def put_single_units(
    rows: Address,
    row_bytes: int,
    n_lanes: int,
    goal: Address,
    first: int,
    n_units: int,
    unit: int,
    flip: Any,
) -> None:
    """Units from `first` on, one after the other; a number of rows that is not known when compiling
    keeps LLVM from making vectors of them, which takes longer."""
    for i in range(first, n_units):
        to = goal + LANES * unit * i
        for lane in range(n_lanes):
            row = rows + lane * row_bytes
            if unit == 1:
                put_u8(to, lane, get_u8(row, i))
            elif unit == 2:
                put_u16(to, lane, get_u16(row, i))
            else:
                put_i32(to, lane, get_i32(row, i) ^ flip)


@njit
def put_units(
    rows: Address, row_bytes: int, n_lanes: int, goal: Address, n_units: int, unit: int, change: int
) -> None:
    """A field of one block of each row: unit 0 of all rows, then unit 1, ..."""
    n_words = n_units if unit == WORD else n_units // WORD
    if n_lanes < LANES or unit == 2:
        n_words = 0
    flip = SIGN_BITS if change == FLIP_SIGNS else np.int32(0)
    done = 0
    while done + 4 <= n_words:
        transpose_words(rows + WORD * done, row_bytes, goal + WORD * LANES * done, flip)
        if unit == 1:
            for i in range(done, done + 4):
                store_i32(goal, LANES * i, bytes_apart(load_i32(goal, LANES * i)))
        done += 4
    for i in range(done, n_words):
        words = xor_i32(load_column(rows + WORD * i, row_bytes), i32x16(flip))
        if unit == 1:
            words = bytes_apart(words)
        store_i32(goal, LANES * i, words)
    first = WORD // unit * n_words
    put_single_units(rows, row_bytes, n_lanes, goal, first, n_units, unit, flip)
    if change == SPREAD_BITS:
        for i in range(n_units):
            store_i32(goal, LANES * i, spread_bits(load_i32(goal, LANES * i)))


@njit
def lay_panel(job: Any, rows: Address, n_lanes: Count, n_more: Count, out: Address) -> None:
    """Up to 16 rows become a panel at `out`; rows and blocks that complete it become zero.

    The rows that follow are asked for one after the other, since the processor takes 16 rows that
    are read at once for no stream. Their pages have to be mapped by then: what is asked for in
    others the processor passes over.

    Args:
        job: a `FillJob` or a `LateJob`.
        n_more: rows of the matrix that follow.
    """
    ahead = rows + LANES * job.row_bytes
    end = ahead + min(LANES, n_more) * job.row_bytes
    page = ahead - ahead % PAGE + PAGE
    while page + 8 <= end:
        atomic_load(page, 0)
        page += PAGE
    row_blocks = job.row_bytes // job.block_bytes
    n_records = (row_blocks + job.record_blocks - 1) // job.record_blocks
    cleared = n_records * job.record_bytes
    if n_lanes < LANES:
        cleared = 0
    elif row_blocks < n_records * job.record_blocks:
        cleared -= job.record_bytes
    for i in range(cleared, n_records * job.record_bytes):
        put_u8(out, i, 0)
    step = SMALL_BLOCKS if job.record_blocks > 1 else 1
    line = ahead
    for first in range(0, row_blocks, step):
        last = min(first + step, row_blocks)
        stop = min(line + LANES * step * job.block_bytes, end)
        while line < stop:
            prefetch(line, 0)
            line += CACHE_LINE
        for index in range(job.n_planes):
            plane = read_plane(job.table, index)
            n, unit, change = plane.n_units, plane.unit_bytes, plane.change
            n_bytes = n * unit
            start = rows + first * job.block_bytes + plane.start
            goal = out + first // job.record_blocks * job.record_bytes + plane.record_start
            in_record = 0
            for _ in range(first, last):
                put_units(start, job.row_bytes, n_lanes, goal, n, unit, change)
                start += job.block_bytes
                goal += LANES * n_bytes
                in_record += 1
                if in_record == job.record_blocks:
                    in_record = 0
                    goal += job.record_bytes - job.record_blocks * LANES * n_bytes
