"""In which order the CPU keeps the bytes of a page: so that vectors are read in one piece.

The pool gives each plane uint8 [n_pages, n_kv_heads, PAGE_TOKENS, n_blocks, plane bytes], a row's
plane with 1 for n_blocks. Of these
the CPU uses each *region* (page and KV head) in an order of its own, by the plane's role:

    rows    as in the pool, row by row; codes and high bits of V: lanes are channels
    lanes   [16 groups][items of a row][16 tokens]; scales and minima of both, codes of K: lanes are
            tokens. An item is a byte of codes, or a value of 2 or 4 bytes. Where 16 bytes hold 16
            values (q8_0), values i and i + 16 of a block become neighbours, as they are in nibbles
    bits    the same for K's plane of fifth bits, an item is a bit
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from localkv.formats.base import Plane, QuantFormat

GROUP = 16
"""Tokens that are stored together: the lanes of a vector."""

Side = Literal["k", "v"]


@dataclass(frozen=True)
class PlaneOrder:
    """The order of one plane.

    Attributes:
        item_bits: bits of what is moved as one, or 0 for whole rows.
        halves: value i + 16 of a block of 32 follows value i.
    """

    item_bits: int = 0
    halves: bool = False


def plane_order(fmt: QuantFormat, plane: Plane, side: Side) -> PlaneOrder:
    """The order of one plane of a type, for K or for V."""
    if plane.name in ("d", "m"):
        return PlaneOrder(16)
    if side == "v":
        return PlaneOrder()
    if fmt.block_size == 1:
        return PlaneOrder(8 * plane.n_bytes)
    if plane.name == "qh":
        return PlaneOrder(1, halves=True)
    return PlaneOrder(8, halves=plane.n_bytes == fmt.block_size)


def _bits(x: Tensor) -> Tensor:
    """uint8 [..., n] -> 0 or 1 [..., 8 n], the lowest bit of a byte first."""
    return ((x[..., None] >> x.new_tensor(range(8))) & 1).flatten(-2)


def restore_plane(order: PlaneOrder, stored: Tensor) -> Tensor:
    """From the CPU's order to the pool's: uint8 [pages, heads, tokens, n_blocks, bytes], a copy."""
    if order.item_bits == 0:
        return stored.clone()
    pages, heads, tokens, n_blocks, n_bytes = stored.shape
    flat = stored.reshape(pages, heads, tokens // GROUP, -1)
    item = max(1, order.item_bits // 8)
    if order.item_bits == 1:
        flat = _bits(flat)
    lanes = flat.view(pages, heads, tokens // GROUP, -1, GROUP, item)
    rows = lanes.transpose(3, 4)  # [pages, heads, groups, 16 tokens, items, bytes of an item]
    if order.halves:
        n_groups = tokens // GROUP
        halves = rows.reshape(pages, heads, n_groups, GROUP, -1, 16, 2, item)
        rows = halves.transpose(5, 6)
    rows = rows.reshape(pages, heads, tokens, -1)
    if order.item_bits == 1:
        eights = rows.reshape(pages, heads, tokens, -1, 8)
        rows = (eights << rows.new_tensor(range(8))).sum(-1).to(stored.dtype)
    return rows.reshape(pages, heads, tokens, n_blocks, n_bytes)
