"""What the workers that store rows get: arrays of int64, read as named tuples.

Where a chain makes a job (`store/store_kv.py`) an item may also name memory, or a number that the
chain is given when it runs; workers find an address, or the number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from localkv.kernels.cpu.runtime.chain import Item


class StoreJob(NamedTuple):
    """Rows of K or V to be encoded; `n_planes` of `PlaneJob` follow.

    Attributes:
        next_head: the KV head to take next.
        n_kv_heads, head_dim: sizes.
        rotation: values that are rotated together, or 0.
        x: float32 [tokens, n_kv_heads, head_dim].
        n_rows: how many are stored.
        tokens, slots: int64 [n_rows] each: which rows of x, and where to; a slot is
            page * PAGE_TOKENS + offset.
        scratch, scratch_bytes: memory of the threads, and how much each has: a rotated row and a
            packed one.
        codebook: float32 [16], of types with one; else 0.
    """

    next_head: Item
    n_kv_heads: Item
    head_dim: Item
    rotation: Item
    x: Item
    n_rows: Item
    tokens: Item
    slots: Item
    scratch: Item
    scratch_bytes: Item
    codebook: Item
    n_planes: Item


class GroupJob(NamedTuple):
    """Groups of rows of K or V to be packed from rows of f16; `n_planes` of `PlaneJob` follow.

    The other side's type may pack more tokens together than this one does.

    Attributes:
        next_head: the KV head to take next.
        n_kv_heads, head_dim: sizes.
        rotation: values that are rotated together, or 0.
        scales: float32 [n_kv_heads], by which rows of a head are divided, or 0.
        n_groups: how many groups there are.
        groups: int64 [n_groups, 2], the slots of a group's first row and of its first row of f16;
            where the first is negative, there is nothing to do.
        n_parts: parts of a group that this type packs one after the other.
        tail: the plane of f16 rows.
        scratch, scratch_bytes: memory of the threads, and how much each has: a group's rows as
            float32, their codes, and packed fields of one row or of the group's scales.
        codebook: float32 [16], of types with one; else 0.
    """

    next_head: Item
    n_kv_heads: Item
    head_dim: Item
    rotation: Item
    scales: Item
    n_groups: Item
    groups: Item
    n_parts: Item
    tail: Item
    scratch: Item
    scratch_bytes: Item
    codebook: Item
    n_planes: Item


class PlaneJob(NamedTuple):
    """One plane of a segment and the order of its bytes (`shared/cpu/page_order.py`).

    Attributes:
        packed: uint8 [n_rows, n_kv_heads, row_bytes] to be moved; 0 for rows that are encoded on
            the way.
        plane: its address.
        row_bytes, page_bytes: bytes of a row in it, and from page to page.
        item_bits, rows, columns: its order; 0 bits for the pool's.
    """

    packed: Item
    plane: Item
    row_bytes: Item
    page_bytes: Item
    item_bits: Item
    rows: Item
    columns: Item


class RotateJob(NamedTuple):
    """Rows to be rotated: `n_blocks` blocks of float32 from `x` to `out`."""

    next_part: Item
    n_blocks: Item
    block: Item
    x: Item
    out: Item


STORE_ITEMS, GROUP_ITEMS = len(StoreJob._fields), len(GroupJob._fields)
