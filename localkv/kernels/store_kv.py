"""Packing new rows of K and V into their pages."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from localkv.cache.kv_cache import LayerCache, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.formats.base import QuantFormat
from localkv.kernels.hadamard import hadamard_transform
from localkv.kernels.torch_codec import encode

StoreKV = Callable[[Tensor, Tensor, LayerCache, tuple[SegmentBatch, ...]], None]
"""(k, v, cache, its batches) with k, v [tokens, n_kv_heads, head_dim] as they are to be packed."""


def _store_rows(
    fmt: QuantFormat, planes: tuple[Tensor, ...], x: Tensor, batch: SegmentBatch
) -> None:
    pages, offsets = batch.slots // PAGE_TOKENS, batch.slots % PAGE_TOKENS
    for plane, values in zip(planes, encode(fmt, x[batch.tokens]), strict=True):
        plane[pages, :, offsets] = values


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, batches: tuple[SegmentBatch, ...]) -> None:
    """Store a batch's rows: k, v [tokens, n_kv_heads, head_dim], each in its segment's types."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        _store_rows(segment.format_k, segment.k, k, batch)
        _store_rows(segment.format_v, segment.v, v, batch)


def store_rotated(
    store: StoreKV, k: Tensor, v: Tensor, cache: LayerCache, batches: tuple[SegmentBatch, ...]
) -> None:
    """Let `store` pack a batch's rows, rotated and scaled by head as each segment wants them."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        if len(batch.tokens):
            rotated_k = hadamard_transform(k, segment.rotation_k)
            rotated_v = hadamard_transform(v, segment.rotation_v)
            if segment.scale_k is not None:
                rotated_k = rotated_k / segment.scale_k[:, None]
            if segment.scale_v is not None:
                rotated_v = rotated_v / segment.scale_v[:, None]
            store(rotated_k, rotated_v, LayerCache((segment,)), (batch,))
