"""Attention over latents that decodes all of a sequence's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Batch, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.reference.attention import first_of_tail, read_pages, visible


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
