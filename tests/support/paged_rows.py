"""A cache with random rows in permuted pages, and NaN wherever nothing was stored."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams, CacheGroup
from localkv.cache.arrays import Batch, Segment, SegmentBatch
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS, GroupLayout, SegmentSpec
from localkv.kernels.reference.backend import read_pages, store_kv
from localkv.kernels.reference.torch_arrays import TorchArrays


@dataclass(frozen=True)
class PagedRows:
    """Sequences of (past, new) tokens, stored by the reference, and queries of the new ones."""

    q: Tensor
    segment: Segment
    seg_batch: SegmentBatch
    batch: Batch


def poisoned_cache(
    *,
    type_k: str,
    type_v: str,
    n_kv_heads: int,
    head_dim: int,
    n_ctx: int,
    value_dim: int | None = None,
    n_sequences: int = 1,
) -> KVCache:
    group = CacheGroup(n_kv_heads, head_dim, value_dim or head_dim, 0, (0,))
    layout = GroupLayout(group, (SegmentSpec(type_k, type_v),))
    cache = KVCache([layout], arrays=TorchArrays("cpu"), n_ctx=n_ctx, n_sequences=n_sequences)
    for pool in cache.pools:
        pool.free = pool.free[::2] + pool.free[1::2][::-1]
    for plane in (*cache.layers[0].segments[0].k, *cache.layers[0].segments[0].v):
        plane.fill_(0xFF)  # NaN in every type
    return cache


def paged_rows(
    lengths: Sequence[tuple[int, int]],
    *,
    type_k: str = "f16",
    type_v: str = "f16",
    n_kv_heads: int = 1,
    group: int = 1,
    head_dim: int = 64,
    value_dim: int | None = None,
    size: float = 1.0,
    seed: int = 0,
) -> PagedRows:
    """K and V are normal numbers times `size`."""
    generator = torch.Generator().manual_seed(seed)
    n_ctx = max(past + new for past, new in lengths)
    cache = poisoned_cache(
        type_k=type_k,
        type_v=type_v,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        n_ctx=n_ctx,
        n_sequences=len(lengths),
    )
    layer = cache.layers[0]
    sequences = [cache.new_sequence() for _ in lengths]

    def store(parts: list[tuple[int, int]]) -> Batch:
        batch = cache.batch([(sequences[i], [0] * n) for i, n in parts])
        n_rows = len(batch.token_ids)
        k, v = (
            size * torch.randn(n_rows, n_kv_heads, dim, generator=generator)
            for dim in (head_dim, value_dim or head_dim)
        )
        store_kv(k, v, layer, batch.segments)
        for i, n in parts:
            sequences[i].length += n
        return batch

    past = [(i, past) for i, (past, _) in enumerate(lengths) if past]
    if past:
        store(past)
    batch = store([(i, new) for i, (_, new) in enumerate(lengths)])
    q = 2 * torch.randn(len(batch.token_ids), n_kv_heads * group, head_dim, generator=generator)
    return PagedRows(q, layer.segments[0], batch.segments[0], batch)


def plain_attention(
    rows: PagedRows,
    scale: float,
    *,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
    alibi: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax as in the books, in float64, one token and head at a time."""
    q, segment, seg_batch, batch = rows.q.double(), rows.segment, rows.seg_batch, rows.batch
    out = q.new_zeros(*q.shape[:2], segment.value_dim)
    lse = torch.full_like(q[..., 0], -torch.inf)
    group = q.shape[1] // segment.k[0].shape[1]
    for i, (start, end) in enumerate(itertools.pairwise(batch.starts)):
        length, table = seg_batch.lengths[i], seg_batch.page_table[i]
        k = read_pages(segment.format_k, segment.k, table, length, torch.float64)
        v = read_pages(segment.format_v, segment.v, table, length, torch.float64)
        for token in range(start, end):
            last = int(batch.positions[token]) - seg_batch.first_position
            first = max(0, last - window + 1) if window else 0
            keys = slice(last // chunk * chunk if chunk else first, last + 1)
            for head in range(q.shape[1]):
                logits = k[head // group, keys] @ q[token, head] * scale
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                if alibi:
                    slope = AttentionParams(scale, alibi=alibi).slopes(q.shape[1])[head]
                    logits = logits - slope * torch.arange(len(logits) - 1, -1, -1)
                if len(logits):
                    weights = logits.softmax(-1)
                    lse[token, head] = logits.logsumexp(-1)
                    out[token, head] = weights @ v[head // group, keys]
                if sinks is not None:
                    both = torch.logaddexp(lse[token, head], sinks[head].double())
                    out[token, head] *= torch.exp(lse[token, head] - both)
                    lse[token, head] = both
    return out, lse


def spoil_unseen_pages(rows: PagedRows, params: AttentionParams) -> None:
    """Fill pages of which no token sees a row with NaN, as if others had got them."""
    segment, seg_batch, batch = rows.segment, rows.seg_batch, rows.batch
    for i, start in enumerate(batch.starts[:-1]):
        first = max(0, int(params.first_visible(batch.positions[start])))
        for page in seg_batch.page_table[i, : first // PAGE_TOKENS].tolist():
            for plane in (*segment.k, *segment.v):
                plane[page] = 0xFF
