"""Causal attention over the packed, paged cache.

Attention runs segment by segment and yields, besides the output, the log-sum-exp of the logits, by
which the segments' outputs are merged. The rows of the batch itself are read from the cache like
all others, so a prompt gives the same in one chunk as in many.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams
from localkv.cache.kv_cache import Batch, LayerCache, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.formats.base import QuantFormat
from localkv.kernels.hadamard import hadamard_transform
from localkv.kernels.torch_codec import decode

SegmentAttention = Callable[
    [Tensor, Segment, SegmentBatch, Batch, AttentionParams], tuple[Tensor, Tensor]
]
"""(q, segment, its batch, batch, params) -> output [tokens, n_heads, head_dim] and log-sum-exp
[tokens, n_heads]. Of a token that sees no row of the segment they are 0 and minus infinity."""

Rotate = Callable[[Tensor, int], Tensor]
"""(x, channels that are rotated together or 0) -> x, rotated."""


def read_pages(
    fmt: QuantFormat, planes: tuple[Tensor, ...], pages: Tensor, n_rows: int, dtype: torch.dtype
) -> Tensor:
    """The first `n_rows` rows of `pages`, decoded: [n_kv_heads, n_rows, head_dim]."""
    rows = decode(fmt, [plane[pages] for plane in planes])  # [pages, heads, rows, head_dim]
    return rows.transpose(0, 1).flatten(1, 2)[:, :n_rows].to(dtype)


def group_queries(q: Tensor, n_kv_heads: int) -> Tensor:
    """[tokens, n_heads, d] -> [n_kv_heads, group * tokens, d]: the heads that share K and V."""
    tokens, n_heads, head_dim = q.shape
    grouped = q.view(tokens, n_kv_heads, n_heads // n_kv_heads, head_dim)
    return grouped.permute(1, 2, 0, 3).reshape(n_kv_heads, -1, head_dim)


def ungroup(x: Tensor, tokens: int) -> Tensor:
    """The inverse of `group_queries`, for [n_kv_heads, group * tokens, ...]."""
    n_kv_heads = x.shape[0]
    grouped = x.view(n_kv_heads, -1, tokens, *x.shape[2:])
    return grouped.movedim(2, 0).flatten(1, 2)


def visible(positions: Tensor, window: int, first_key: int, n_keys: int, group: int) -> Tensor:
    """Causal mask [group * tokens, n_keys] for keys at `first_key`, `first_key` + 1, ...;
    only the latest `window` are seen unless that is 0."""
    keys = torch.arange(first_key, first_key + n_keys, device=positions.device)
    age = positions[:, None] - keys
    mask = (age >= 0) & (age < window) if window else age >= 0
    return mask.repeat(group, 1)


def attention_reference(
    q: Tensor, segment: Segment, seg_batch: SegmentBatch, batch: Batch, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Decode all of K and V, then plain softmax. See `SegmentAttention` for shapes."""
    n_kv_heads = segment.k[0].shape[1]
    group = q.shape[1] // n_kv_heads
    out = torch.zeros_like(q)
    lse = torch.full_like(q[..., 0], -torch.inf)
    for i, length in enumerate(seg_batch.lengths):
        rows = slice(batch.starts[i], batch.starts[i + 1])
        if length == 0:
            continue
        pages = seg_batch.page_table[i, : -(-length // PAGE_TOKENS)]
        k = read_pages(segment.format_k, segment.k, pages, length, q.dtype)
        v = read_pages(segment.format_v, segment.v, pages, length, q.dtype)
        logits = group_queries(q[rows], n_kv_heads) @ k.mT * params.softmax_scale
        if params.softcap:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        mask = visible(
            batch.positions[rows], params.window, seg_batch.first_position, length, group
        )
        logits = logits.masked_fill(~mask, -torch.inf)
        tokens = rows.stop - rows.start
        weights = logits.softmax(-1).masked_fill(~mask, 0.0)  # NaN where nothing is visible
        out[rows] = ungroup(weights @ v, tokens)
        lse[rows] = ungroup(logits.logsumexp(-1), tokens)
    return out, lse


def merge_segments(parts: list[tuple[Tensor, Tensor]], sinks: Tensor | None = None) -> Tensor:
    """Outputs [tokens, n_heads, head_dim] of several segments, weighted by exp(log-sum-exp).

    Args:
        sinks: [n_heads], logits of one more segment for each head, whose output is 0.
    """
    if len(parts) == 1 and sinks is None:
        return parts[0][0]
    lse = torch.stack([lse for _, lse in parts])
    # torch's softmax along this axis would treat the last few tokens differently from the others
    most = lse.amax(0) if sinks is None else torch.maximum(lse.amax(0), sinks)
    weights = torch.exp(lse - most)
    total = weights.sum(0) if sinks is None else weights.sum(0) + torch.exp(sinks - most)
    weights = weights / total
    return (torch.stack([out for out, _ in parts]) * weights[..., None]).sum(0)


def per_query_head(scale: Tensor, n_heads: int) -> Tensor:
    """The scale of each query head, from its KV head's: [n_kv_heads] -> [n_heads, 1]."""
    return scale.repeat_interleave(n_heads // scale.numel())[:, None]


def attention(
    run: SegmentAttention,
    q: Tensor,
    cache: LayerCache,
    batch: Batch,
    params: AttentionParams,
    sinks: Tensor | None = None,
    rotate: Rotate = hadamard_transform,
) -> Tensor:
    """Attention of a batch over all segments: q and result [tokens, n_heads, head_dim].

    Queries meet the rotated keys of a segment rotated, and its output is rotated back. Scales of
    heads are applied to queries and outputs, so that no kernel knows of them.
    """
    parts = []
    for segment, seg_batch in zip(cache.segments, cache.rows_of(batch), strict=True):
        rotated = rotate(q, segment.rotation_k)
        if segment.scale_k is not None:
            rotated = rotated * per_query_head(segment.scale_k, q.shape[1])
        out, lse = run(rotated, segment, seg_batch, batch, params)
        if segment.scale_v is not None:
            out = out * per_query_head(segment.scale_v, q.shape[1])
        parts.append((rotate(out, segment.rotation_v), lse))
    return merge_segments(parts, sinks)
