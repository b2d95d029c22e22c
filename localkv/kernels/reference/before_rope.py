"""Attention with K in the cache as it is before RoPE, as KVQuant has it (arXiv:2401.18079, 3.2).

A channel of K then has much the same values at all positions, but each step has to rotate every key
that it reads. Only the reference does so, to compare with; kernels read K as it is after RoPE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localkv.arch.spec import AttentionSpec, LatentAttentionSpec, LayerSpec
from localkv.cache.arrays import Batch, LayerCache, Segment
from localkv.kernels.attention import merge_segments, times_scales
from localkv.kernels.backend import TokenInputs
from localkv.kernels.layer_weights import AttentionWeights
from localkv.kernels.primitives import Primitives
from localkv.kernels.reference.attention import attention_reference


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
