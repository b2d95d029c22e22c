"""Planes of the CPU's pages in the pool's order, with the same bytes as the reference's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localkv.quant_formats import QuantFormat
from localkv.quant_formats.shared.cpu.page_order import ItemOrder

GROUP = 16


def _items(order: ItemOrder, flat: Tensor) -> Tensor:
    """Items of groups [..., bytes]: uint8 [..., items, 16 tokens, bytes], nibbles as bytes."""
    if order.item_bits >= 8:
        return flat.unflatten(-1, (-1, GROUP, order.item_bits // 8))
    if order.item_bits == 4:
        halves = flat.unflatten(-1, (-1, GROUP // 2))
        return torch.cat([halves & 15, halves >> 4], -1)[..., None]
    bits = flat[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2).unflatten(-1, (-1, GROUP, 1))


def _plane(order: ItemOrder, stored: Tensor) -> Tensor:
    """uint8 [pages, heads, tokens, n_blocks, bytes], in the order of one side -> in the pool's."""
    if order.item_bits == 0:
        return stored.clone()
    groups = stored.flatten(3).unflatten(2, (-1, GROUP)).flatten(3)
    tokens = _items(order, groups).transpose(-3, -2).flatten(2, 3)  # [pages, heads, tokens, items]
    items = tokens
    if order.rows > 1:
        columns = order.columns(stored.shape[-1])
        items = tokens.unflatten(3, (-1, columns, order.rows)).transpose(-3, -2).flatten(3)
    if order.item_bits < 8:
        shifts = torch.arange(0, 8, order.item_bits, dtype=torch.uint8)
        items = (items.unflatten(-1, (-1, len(shifts))) << shifts).sum(-1, dtype=torch.uint8)
    return items.reshape(stored.shape)


def pool_planes(fmt: QuantFormat, side: str, stored: Sequence[Tensor]) -> list[Tensor]:
    """All planes of K ("k") or V ("v") as `fmt.codec.encode` orders their bytes, copied."""
    orders = [getattr(order, side) for order in fmt.cpu_layout.PLANES]
    return [_plane(*pair) for pair in zip(orders, stored, strict=True)]
