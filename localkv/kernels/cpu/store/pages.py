"""Where rows are stored, in compiled code: planes, regions, and the CPU's order of a page.

`shared/cpu/page_order.py` says what the order is.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.store.jobs import PlaneJob
from localkv.simd.kinds import Address
from localkv.simd.memory import get_i32, get_u8, get_u16, put_i32, put_u8, put_u16, reader

read_plane = reader(PlaneJob)


@njit
def region_of(plane: Any, slot: int, head: int) -> Address:
    """The address of a slot's page and KV head in a plane."""
    page = plane.plane + slot // PAGE_TOKENS * plane.page_bytes
    return page + head * PAGE_TOKENS * plane.row_bytes


GROUP = 16


@njit
def put_item(
    region: Address, place: int, lane: int, row: Address, item: int, item_bits: int
) -> None:
    """Store one item of a row as number `place` of its group, for the token `lane`."""
    at = place * GROUP + lane
    if item_bits == 1:
        bit = get_u8(row, item // 8) >> (item % 8) & 1
        others = get_u16(region, place) & ~(1 << lane)
        put_u16(region, place, others | bit << lane)
    elif item_bits == 4:
        nibble = get_u8(row, item // 2) >> (item % 2 * 4) & 15
        at, shift = place * GROUP // 2 + lane % 8, lane // 8 * 4
        put_u8(region, at, get_u8(region, at) & ~(15 << shift) | nibble << shift)
    elif item_bits == 8:
        put_u8(region, at, get_u8(row, item))
    elif item_bits == 16:
        put_u16(region, at, get_u16(row, item))
    else:
        words = item_bits // 32
        for i in range(words):
            put_i32(region, at * words + i, get_i32(row, item * words + i))


@njit
def put_row(region: Address, row: Address, offset: int, plane: Any) -> None:
    """Store one row at token `offset` of a region of a plane (`PlaneJob`).

    A block's items are stored by columns.
    """
    item_bits, rows, columns = plane.item_bits, plane.rows, plane.columns
    n_items = plane.row_bytes * 8 // item_bits
    first, lane = offset // GROUP * n_items, offset % GROUP
    if rows == 1:
        for item in range(n_items):
            put_item(region, first + item, lane, row, item, item_bits)
        return
    for block in range(0, n_items, rows * columns):
        for i in range(rows):
            for j in range(columns):
                place, item = first + block + j * rows + i, block + i * columns + j
                put_item(region, place, lane, row, item, item_bits)
