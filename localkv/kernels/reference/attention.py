"""Attention that decodes all of a sequence's rows: K and V, or latents.

K may be in the cache as it is before RoPE, as KVQuant has it (arXiv:2401.18079, 3.2).

A channel of K then has much the same values at all positions, but each step has to rotate every key
that it reads. Only the reference does so, to compare with; kernels read K as it is after RoPE.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams, AttentionSpec, LatentAttentionSpec, LayerSpec
from localkv.cache.arrays import Batch, LayerCache, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.attention import merge_segments, times_scales
from localkv.kernels.backend import TokenInputs
from localkv.kernels.layer_weights import AttentionWeights
from localkv.kernels.primitives import Primitives
from localkv.kernels.reference.torch_arrays import decode
from localkv.quant_formats.base import QuantFormat


def read_pages(
    fmt: QuantFormat,
    planes: tuple[Tensor, ...],
    pages: Tensor,
    n_rows: int,
    dtype: torch.dtype,
    codebook: Tensor | None = None,
) -> Tensor:
    """The first `n_rows` rows of `pages`, decoded: [n_kv_heads, n_rows, head_dim]."""
    rows = decode(
        fmt, [plane[pages].cpu() for plane in planes], codebook
    )  # [pages, heads, rows, head_dim]
    return rows.transpose(0, 1).flatten(1, 2)[:, :n_rows].to(planes[0].device, dtype)


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


def visible(
    positions: Tensor,
    params: AttentionParams,
    first_key: int,
    n_keys: int,
    group: int,
    seg_batch: SegmentBatch,
    sequence: int,
) -> Tensor:
    """Mask [group * tokens, n_keys] for keys at `first_key`, `first_key` + 1, ...: causal, no
    further back than a window or chunk, and of those that are in a tail or behind it."""
    keys = torch.arange(first_key, first_key + n_keys, device=positions.device)
    mask: Tensor = (keys <= positions[:, None]) & (keys >= params.first_visible(positions)[:, None])
    if seg_batch.tail is not None:
        begin = seg_batch.tail.begin(positions).clamp(min=seg_batch.exact_from[sequence])
        mask &= (keys >= begin[:, None]) == seg_batch.is_tail
    return mask.repeat(group, 1)


def first_of_tail(positions: Tensor, seg_batch: SegmentBatch, sequence: int) -> int:
    """The first row that tokens read of a segment of tails; 0 in other segments."""
    if seg_batch.tail is None or not seg_batch.is_tail:
        return 0
    begin = max(int(seg_batch.tail.begin(positions).min()), seg_batch.exact_from[sequence])
    return begin - seg_batch.first_position


Turn = Callable[[Tensor, int, Segment], Tensor]
"""(K as it is stored [n_kv_heads, keys, head_dim], the first key's position, its segment) -> K as q
meets it."""


def attention_reference(
    q: Tensor,
    segment: Segment,
    seg_batch: SegmentBatch,
    batch: Batch,
    params: AttentionParams,
    turn: Turn | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode all of K and V, then plain softmax. See `SegmentAttention` for shapes."""
    n_kv_heads = segment.k[0].shape[1]
    group = q.shape[1] // n_kv_heads
    out = torch.zeros_like(q)
    lse = torch.full_like(q[..., 0], -torch.inf)
    for i, length in enumerate(seg_batch.lengths):
        rows = slice(batch.starts[i], batch.starts[i + 1])
        positions = batch.positions[rows]
        first = int(params.first_visible(positions).min()) - seg_batch.first_of(i)
        first = max(first, first_of_tail(positions, seg_batch, i))
        if first >= length or not length:
            continue
        # pages before may have been given back
        skipped = max(0, first) // PAGE_TOKENS
        n_keys = length - skipped * PAGE_TOKENS
        pages = seg_batch.page_table[i, skipped : -(-length // PAGE_TOKENS)]
        k = read_pages(segment.format_k, segment.k, pages, n_keys, q.dtype, segment.codebook_k)
        v = read_pages(segment.format_v, segment.v, pages, n_keys, q.dtype, segment.codebook_v)
        first_key = seg_batch.first_of(i) + skipped * PAGE_TOKENS
        if turn is not None:
            k = turn(k, first_key, segment)
        logits = group_queries(q[rows], n_kv_heads) @ k.mT * params.softmax_scale
        if params.softcap:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        mask = visible(positions, params, first_key, n_keys, group, seg_batch, i)
        logits = logits.masked_fill(~mask, -torch.inf)
        tokens = rows.stop - rows.start
        weights = logits.softmax(-1).masked_fill(~mask, 0.0)  # NaN where nothing is visible
        out[rows] = ungroup(weights @ v, tokens)
        lse[rows] = ungroup(logits.logsumexp(-1), tokens)
    return out, lse


def latents_reference(
    q: Tensor,
    q_rotated: Tensor,
    segment: Segment,
    seg_batch: SegmentBatch,
    batch: Batch,
    params: AttentionParams,
) -> tuple[Tensor, Tensor]:
    """Decode all rows, then plain softmax. See `SegmentLatents` for shapes."""
    n_heads = q.shape[1]
    out = torch.zeros_like(q)
    lse = torch.full_like(q[..., 0], -torch.inf)
    for i, length in enumerate(seg_batch.lengths):
        tokens = slice(batch.starts[i], batch.starts[i + 1])
        first = first_of_tail(batch.positions[tokens], seg_batch, i)
        if first >= length:
            continue
        # pages before may have been given back
        skipped = first // PAGE_TOKENS
        n_rows = length - skipped * PAGE_TOKENS
        pages = seg_batch.page_table[i, skipped : -(-length // PAGE_TOKENS)]
        latents = read_pages(
            segment.format_k, segment.k, pages, n_rows, q.dtype, segment.codebook_k
        )[0]
        rotated = read_pages(
            segment.format_v, segment.v, pages, n_rows, q.dtype, segment.codebook_v
        )[0]
        logits = q[tokens] @ latents.mT + q_rotated[tokens] @ rotated.mT  # [tokens, heads, rows]
        logits = logits * params.softmax_scale
        if params.softcap:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        keys = seg_batch.first_position + skipped * PAGE_TOKENS, n_rows
        mask = visible(batch.positions[tokens], params, *keys, 1, seg_batch, i)
        mask = mask[:, None].expand(-1, n_heads, -1)
        logits = logits.masked_fill(~mask, -torch.inf)
        weights = logits.softmax(-1).masked_fill(~mask, 0.0)  # NaN where nothing is visible
        out[tokens] = weights @ latents
        lse[tokens] = logits.logsumexp(-1)
    return out, lse


def attend_before_rope(
    p: Primitives,
    q: Tensor,
    cache: LayerCache,
    batch: Batch,
    attn: AttentionSpec,
    weights: AttentionWeights,
    inputs: TokenInputs,
) -> Tensor:
    """As `Attend` has it: rows of K are turned when they are read."""

    def turned(k: Tensor, first: int, segment: Segment) -> Tensor:
        # a matrix of Hadamard's undoes itself
        rows: Tensor = p.rotate(k, segment.rotation_k).transpose(0, 1)
        rows = times_scales(rows, segment.scale_k)
        if inputs.rope_at is not None:
            positions = torch.arange(first, first + len(rows), device=rows.device)
            rows = p.apply_rope(rows, inputs.rope_at(positions))
        return rows.transpose(0, 1)

    parts = []
    for segment, rows in zip(cache.segments, cache.rows_of(batch), strict=True):
        out, lse = attention_reference(q, segment, rows, batch, attn.params, turned)
        parts.append((p.rotate(times_scales(out, segment.scale_v), segment.rotation_v), lse))
    merged: Tensor = merge_segments(parts, weights.sinks)
    return merged


def lacks_before_rope(spec: LayerSpec) -> str:
    """What of a layer can't have K before RoPE, in words; empty if it can."""
    for mixer in (spec.mixer, spec.beside):
        if isinstance(mixer, LatentAttentionSpec):
            return "latents with K before RoPE"
        if isinstance(mixer, AttentionSpec) and mixer.norms_after_rope:
            return "K before RoPE where heads are normed after it"
    return ""
