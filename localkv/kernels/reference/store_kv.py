"""Packing rows by the formats' own encoders."""

from __future__ import annotations

import torch
from torch import Tensor

from localkv.cache.arrays import LayerCache, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.reference.hadamard import hadamard_transform
from localkv.kernels.reference.torch_codec import decode, encode
from localkv.quant_formats.base import QuantFormat


def _store_rows(
    fmt: QuantFormat,
    planes: tuple[Tensor, ...],
    x: Tensor,
    batch: SegmentBatch,
    codebook: Tensor | None,
) -> None:
    pages, offsets = batch.slots // PAGE_TOKENS, batch.slots % PAGE_TOKENS
    for plane, values in zip(planes, encode(fmt, x[batch.tokens].cpu(), codebook), strict=True):
        plane[pages, :, offsets] = values.to(plane.device)


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, batches: tuple[SegmentBatch, ...]) -> None:
    """Store a batch's rows: k, v [tokens, n_kv_heads, head_dim], each in its segment's types."""
    for segment, batch in zip(cache.segments, batches, strict=True):
        if segment.is_whole:
            continue
        _store_rows(segment.format_k, segment.k, k, batch, segment.codebook_k)
        _store_rows(segment.format_v, segment.v, v, batch, segment.codebook_v)


def pack_groups(segment: Segment, tail: Segment, groups: Tensor) -> None:
    """See `PackGroups`."""
    of_k = segment.format_k, segment.k, tail.k
    of_v = segment.format_v, segment.v, tail.v
    size = max(segment.format_k.group_tokens, segment.format_v.group_tokens)
    groups = groups[(groups >= 0).all(1)]
    goal, source = (slots[:, None] + torch.arange(size, device=slots.device) for slots in groups.T)
    for fmt, planes, rows, rotation, scale, codebook in (
        (*of_k, segment.rotation_k, segment.scale_k, segment.codebook_k),
        (*of_v, segment.rotation_v, segment.scale_v, segment.codebook_v),
    ):
        # [groups, tokens, heads, 1, channels] -> [groups, heads, tokens, channels]
        halves = rows[0][source // PAGE_TOKENS, :, source % PAGE_TOKENS].transpose(1, 2)
        x = hadamard_transform(decode(tail.format_k, [halves.cpu()]), rotation)
        if scale is not None:
            x = x / scale.cpu()[:, None, None]
        for plane, values in zip(planes, encode(fmt, x, codebook), strict=True):
            packed = values.to(plane.device).transpose(1, 2)
            plane[goal // PAGE_TOKENS, :, goal % PAGE_TOKENS] = packed
