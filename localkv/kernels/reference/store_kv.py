"""Packing rows by the formats' own encoders."""

from __future__ import annotations

from torch import Tensor

from localkv.cache.batch import SegmentBatch
from localkv.cache.layer_cache import LayerCache
from localkv.cache.layout import PAGE_TOKENS
from localkv.formats.base import QuantFormat
from localkv.kernels.reference.torch_codec import encode


def _store_rows(
    fmt: QuantFormat, planes: tuple[Tensor, ...], x: Tensor, batch: SegmentBatch
) -> None:
    pages, offsets = batch.slots // PAGE_TOKENS, batch.slots % PAGE_TOKENS
    for plane, values in zip(planes, encode(fmt, x[batch.tokens].cpu()), strict=True):
        plane[pages, :, offsets] = values.to(plane.device)


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, batches: tuple[SegmentBatch, ...]) -> None:
    """Store a batch's rows: k, v [tokens, n_kv_heads, head_dim], each in its segment's types."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        _store_rows(segment.format_k, segment.k, k, batch)
        _store_rows(segment.format_v, segment.v, v, batch)
