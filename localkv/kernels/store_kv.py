"""Packing new rows of K and V into their pages."""

from __future__ import annotations

from collections.abc import Callable

from localkv.cache.arrays import Array, LayerCache, Segment, SegmentBatch
from localkv.kernels.attention import Rotate

StoreKV = Callable[[Array, Array, LayerCache, tuple[SegmentBatch, ...]], None]
"""(k, v, cache, its batches) with k, v [tokens, n_kv_heads, head_dim] as they are to be packed."""

PackGroups = Callable[[Segment, Segment, Array], None]
"""(segment, that of the tails, groups int64 [n, 2]): pack groups of rows of the tails, rotated and
scaled by head as the segment wants them; see `SegmentBatch.groups`."""


def pack_groups(pack: PackGroups, cache: LayerCache, batches: tuple[SegmentBatch, ...]) -> None:
    """Pack the groups that a batch has completed, once its rows are stored."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        if batch.groups is not None and len(batch.groups):
            pack(segment, cache.segments[-1], batch.groups)


def store_rotated(
    store: StoreKV,
    rotate: Rotate,
    k: Array,
    v: Array,
    cache: LayerCache,
    batches: tuple[SegmentBatch, ...],
) -> None:
    """Let `store` pack a batch's rows, rotated and scaled by head as each segment wants them."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        if len(batch.tokens):
            rotated_k = rotate(k, segment.rotation_k)
            rotated_v = rotate(v, segment.rotation_v)
            if segment.scale_k is not None:
                rotated_k = rotated_k / segment.scale_k[:, None]
            if segment.scale_v is not None:
                rotated_v = rotated_v / segment.scale_v[:, None]
            store(rotated_k, rotated_v, LayerCache((segment,)), (batch,))
