"""In which order the CPU keeps the bytes of a page: so that vectors are read in one piece.

The pool gives each plane uint8 [n_pages, n_kv_heads, PAGE_TOKENS, n_blocks, plane bytes], a row's
plane with 1 for n_blocks. The CPU uses each *region* of it (page and KV head) in an order of its
own:

    [groups of 16 tokens][items of a row][16 tokens]

Of K, and of scales and minima on both sides, an item is a value of 2 or 4 bytes, or a byte, a
nibble or a bit of packed codes. There lanes are tokens. Of V's codes and their high bits an item is
what a unit takes of them, so lanes are channels. Four tokens that are multiplied at once lie
together.

Tokens of a group that are bits or nibbles are packed as 16 values of ggml are. Token i of bits is
bit i of 16. Tokens i and i + 8 of nibbles are the low and the high half of byte i.

Codes and their high bits may lie in different places of a block. Then the items of one of them are
stored in the order of the other: as a matrix of `rows` rows, column by column. An example is the
plane `qh` of q5_0, whose 32 bits belong to values 0 to 31. Beside a byte of `qs` with values i and
i + 16 belong bits i and i + 16, so the bits are a matrix of two rows:

    0  1  2 ... 15
    16 17 18 ... 31     are stored as 0 16 1 17 2 18 ... 15 31

Who takes rows out of a cache, which no kernel does, uses `rows_of_pages` and `pages_of_rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

GROUP = 16
"""Tokens whose items lie together."""


class ItemOrder(NamedTuple):
    """Where the items of a plane lie on one side.

    Attributes:
        item_bits: bits of an item, which is moved as one (1, 4, 8, 16, or a multiple of 32), or 0
            where a region has the bytes of the pool in the pool's order.
        rows: the items of a block of 32 are a matrix of this many rows, stored by columns.
        blocks: of 32 values that a plane's block has.
    """

    item_bits: int
    rows: int = 1
    blocks: int = 1

    def columns(self, plane_bytes: int) -> int:
        """The columns of that matrix, in a plane with `plane_bytes` per block."""
        items = 8 * plane_bytes // self.item_bits if self.item_bits else 0
        return items // self.rows // self.blocks

    def float_rows(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The rows of a plane of whole numbers of floats per item: [pages, heads, tokens, channels]
        in the CPU's order -> in the pool's, a copy."""
        *pages, n_tokens, n_channels = values.shape
        n = self.item_bits // 32  # channels of an item
        items = values.reshape(*pages, n_tokens // GROUP, n_channels // n, GROUP, n)
        return items.swapaxes(-3, -2).reshape(values.shape)


class PlaneOrder(NamedTuple):
    """The order of one plane, for K and for V."""

    k: ItemOrder
    v: ItemOrder


SCALES = PlaneOrder(ItemOrder(16), ItemOrder(16))
"""Halves that kernels apply: a block's scale or minimum, a row's scale."""

BY_CHANNEL = PlaneOrder(ItemOrder(0), ItemOrder(0))
"""Halves of every channel, for a group of tokens (`shared/channel_groups.py`): lanes are channels
on both sides."""


def codes(item_bits: int, rows: int = 1, unit_items: int = 1, blocks: int = 1) -> PlaneOrder:
    """The values that kernels decode, codes or a part of their bits: a unit has `unit_items` items
    of each token of K."""
    return PlaneOrder(ItemOrder(item_bits, rows, blocks), ItemOrder(16 * unit_items * item_bits))


TWO_BITS = codes(4, rows=8)
"""Codes of two bits, as `bits.two_bit_codes` reads them: a nibble is values i and i + 16."""


def rows_of_pages(order: ItemOrder, pages: Bytes) -> Bytes:
    """Pages [n, heads, tokens, n_blocks, plane bytes] as the CPU has them -> the same bytes in the
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
    """The items of a row."""
    n_blocks, plane_bytes = pages.shape[3:]
    return int(n_blocks * plane_bytes * 8 // order.item_bits)


def _whole(groups: Bytes, item_bits: int, size: int) -> NDArray[np.generic]:
    """Groups of items with an array's item for each; bits and nibbles become bytes."""
    if item_bits == 4:
        halves = groups.reshape(-1, GROUP // 2)
        return np.concatenate([halves & 15, halves >> 4], axis=-1)
    if item_bits == 1:
        return np.unpackbits(groups, axis=-1, bitorder="little")
    return groups.view(_item_type(size))


def _item_type(size: int) -> np.dtype[np.generic]:
    """The type of what is moved as one, `size` bytes."""
    return np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")
