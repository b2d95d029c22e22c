"""Storing one packed row in the CPU's order of a page (see `store/page_layout.py`)."""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.simd.memory import get_i32, get_u8, get_u16, put_i32, put_u8, put_u16

GROUP = 16


@njit
def item_place(item: int, halves: int) -> int:
    """Where an item of a row comes to lie: i and i + 16 of 32 become neighbours."""
    if halves:
        return item // 32 * 32 + item % 16 * 2 + item % 32 // 16
    return item


@njit
def put_row(
    region: Any, row: Any, offset: int, row_bytes: int, item_bits: int, halves: int
) -> None:
    """Store one row at token `offset` of a region."""
    if item_bits == 0:
        for i in range(row_bytes):
            put_u8(region, offset * row_bytes + i, get_u8(row, i))
        return
    n_items = row_bytes * 8 // item_bits
    first, lane = offset // GROUP * n_items, offset % GROUP
    for item in range(n_items):
        group = first + item_place(item, halves)
        at = group * GROUP + lane
        if item_bits == 1:
            bit = get_u8(row, item // 8) >> (item % 8) & 1
            others = get_u16(region, group) & ~(1 << lane)
            put_u16(region, group, others | bit << lane)
        elif item_bits == 8:
            put_u8(region, at, get_u8(row, item))
        elif item_bits == 16:
            put_u16(region, at, get_u16(row, item))
        else:
            put_i32(region, at, get_i32(row, item))
