"""Where rows are stored, in compiled code: planes, regions, and the CPU's order of a page.

`shared/cpu/page_order.py` says what the order is. Rows may be rotated before they are stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.store.jobs import PlaneJob
from localkv.simd import LANES
from localkv.simd.arithmetic import add, f32x16, mul, sub
from localkv.simd.kinds import (
    Address,
    Args,
    Builder,
    Float,
    Intrinsic,
    Kind,
    Signature,
    Target,
    Typing,
    Value,
)
from localkv.simd.memory import (
    get_f32,
    get_i32,
    get_u8,
    get_u16,
    load_f32,
    put_f32,
    put_i32,
    put_u8,
    put_u16,
    reader,
    store_f32,
)
from localkv.simd.vector import F32x16, i1, i32, lanes_of

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


@intrinsic(prefer_literal=True)
def butterfly(typing: Typing, x: Kind, distance: Kind) -> Intrinsic:
    """Sums and differences of lanes at a `distance` of 1, 2, 4 or 8."""
    apart = distance.literal_value

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        partners = ir.Constant(lanes_of(i32), [lane ^ apart for lane in range(LANES)])
        partner = b.shuffle_vector(args[0], args[0], partners)
        upper = ir.Constant(lanes_of(i1), [int(lane & apart > 0) for lane in range(LANES)])
        return b.select(upper, b.fsub(partner, args[0]), b.fadd(args[0], partner))

    return F32x16(F32x16, distance), generate


@njit
def rotate_short(x: Address, out: Address, block: int, factor: Float) -> None:
    """A block of less than a vector's lanes; `out` may be `x`."""
    for i in range(block):
        put_f32(out, i, get_f32(x, i))
    apart = 1
    while apart < block:
        for i in range(block):
            if i & apart == 0:
                a, b = get_f32(out, i), get_f32(out, i + apart)
                put_f32(out, i, a + b)
                put_f32(out, i + apart, a - b)
        apart *= 2
    for i in range(block):
        put_f32(out, i, get_f32(out, i) * factor)


@njit
def rotate_block(x: Address, out: Address, block: int) -> None:
    """Transform `block` floats, a power of two; `out` may be `x`."""
    factor = np.float32(1 / np.sqrt(np.float64(block)))
    if block < LANES:
        rotate_short(x, out, block, factor)
        return
    for i in range(0, block, LANES):
        v = butterfly(butterfly(butterfly(butterfly(load_f32(x, i), 1), 2), 4), 8)
        store_f32(out, i, v)
    apart = LANES
    while apart < block:
        for i in range(0, block, LANES):
            if i & apart == 0:
                a, b = load_f32(out, i), load_f32(out, i + apart)
                store_f32(out, i, add(a, b))
                store_f32(out, i + apart, sub(a, b))
        apart *= 2
    factors = f32x16(factor)
    for i in range(0, block, LANES):
        store_f32(out, i, mul(load_f32(out, i), factors))
