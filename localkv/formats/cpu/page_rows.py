"""Rows of the CPU's pages in the order of the formats' references, and back; see `page_order.py`.

For whoever takes rows out of a cache, which no kernel does. No Numba.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localkv.formats.cpu.page_order import ItemOrder

GROUP = 16
"""Tokens whose items lie together."""

Bytes = NDArray[np.uint8]


def rows_of_pages(order: ItemOrder, pages: Bytes) -> Bytes:
    """Of pages [n, heads, tokens, n_blocks, plane bytes] as the CPU has them: the same bytes in the
    pool's order."""
    if not order.item_bits:
        return pages
    n_items = _items(order, pages)
    size = max(1, order.item_bits // 8)
    lanes = _whole(pages.reshape(-1, n_items * 2 * order.item_bits), order.item_bits, size)
    items = np.ascontiguousarray(lanes.reshape(-1, n_items, GROUP).swapaxes(1, 2))
    if order.rows > 1:
        columns = order.columns(pages.shape[-1])
        matrix = items.reshape(-1, columns, order.rows).swapaxes(1, 2)
        items = np.ascontiguousarray(matrix).reshape(-1, GROUP, n_items)
    if order.item_bits == 4:
        items = items[..., 0::2] | items[..., 1::2] << 4
    elif order.item_bits == 1:
        items = np.packbits(items, axis=-1, bitorder="little")
    return np.ascontiguousarray(items).view(np.uint8).reshape(pages.shape)


def pages_of_rows(order: ItemOrder, rows: Bytes) -> Bytes:
    """The inverse of `rows_of_pages`."""
    if not order.item_bits:
        return rows
    n_items = _items(order, rows)
    flat = np.ascontiguousarray(rows).reshape(-1, GROUP, n_items * order.item_bits // 8)
    if order.item_bits == 4:
        items = np.stack([flat & 15, flat >> 4], axis=-1)
    elif order.item_bits == 1:
        items = np.unpackbits(flat, axis=-1, bitorder="little")
    else:
        items = flat.view(_item_type(order.item_bits // 8))
    if order.rows > 1:
        columns = order.columns(rows.shape[-1])
        items = items.reshape(-1, order.rows, columns).swapaxes(1, 2)
    lanes = np.ascontiguousarray(items).reshape(-1, GROUP, n_items).swapaxes(1, 2)
    if order.item_bits == 4:
        lanes = lanes[..., : GROUP // 2] | lanes[..., GROUP // 2 :] << 4
    elif order.item_bits == 1:
        lanes = np.packbits(lanes, axis=-1, bitorder="little")
    return np.ascontiguousarray(lanes).view(np.uint8).reshape(rows.shape)


def _items(order: ItemOrder, pages: Bytes) -> int:
    """Of a row."""
    n_blocks, plane_bytes = pages.shape[3:]
    return int(n_blocks * plane_bytes * 8 // order.item_bits)


def _whole(groups: Bytes, item_bits: int, size: int) -> NDArray[np.generic]:
    """Groups of items with an array's item for each; those of bits and nibbles are bytes then."""
    if item_bits == 4:
        halves = groups.reshape(-1, GROUP // 2)
        return np.concatenate([halves & 15, halves >> 4], axis=-1)
    if item_bits == 1:
        return np.unpackbits(groups, axis=-1, bitorder="little")
    return groups.view(_item_type(size))


def _item_type(size: int) -> np.dtype[np.generic]:
    """What is moved as one, of so many bytes."""
    return np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")
