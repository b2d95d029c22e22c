"""Moving packed rows into the CPU's order of a page (see `cpu_page_layout`), by KV head."""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit

from localkv.simd.memory import (
    get_i32,
    get_i64,
    get_u8,
    get_u16,
    put_i32,
    put_u8,
    put_u16,
    take_next,
)

CACHE = False
PAGE = 256
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


@cfunc("void(int64, int64)", cache=CACHE, error_model="numpy")
def worker(job: Any, thread: Any) -> None:
    """Scatter the rows of some planes.

    Items of the job: the counter of KV heads, n_kv_heads, n_rows, the address of their slots
    (int64 [n_rows]: page * PAGE + offset), n_planes; then, for each plane: addresses of the rows
    (uint8 [n_rows, n_kv_heads, row_bytes]) and of the plane, row_bytes, item_bits, halves.
    """
    n_kv_heads, n_rows, slots = get_i64(job, 1), get_i64(job, 2), get_i64(job, 3)
    while True:
        head = take_next(job)
        if head >= n_kv_heads:
            break
        for plane in range(get_i64(job, 4)):
            entry = job + (5 + plane * 5) * 8
            rows, target, row_bytes = get_i64(entry, 0), get_i64(entry, 1), get_i64(entry, 2)
            item_bits, halves = get_i64(entry, 3), get_i64(entry, 4)
            for i in range(n_rows):
                slot = get_i64(slots, i)
                place = slot // PAGE * n_kv_heads + head
                region = target + place * PAGE * row_bytes
                row = rows + (i * n_kv_heads + head) * row_bytes
                put_row(region, row, slot % PAGE, row_bytes, item_bits, halves)
