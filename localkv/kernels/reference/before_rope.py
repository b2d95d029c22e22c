"""Attention with K in the cache as it is before RoPE, as KVQuant has it (arXiv:2401.18079, 3.2).

A channel of K then has much the same values at all positions, but each step has to rotate every key
that it reads. Only the reference does so, to compare with; kernels read K as it is after RoPE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localkv.arch.mixer_spec import AttentionSpec, LatentAttentionSpec
from localkv.arch.spec import LayerSpec
from localkv.cache.batch import Batch
from localkv.cache.layer_cache import LayerCache, Segment
from localkv.kernels.attention import merge_segments, times_scales
from localkv.kernels.backend import TokenInputs
from localkv.kernels.grouped_attention import gated, key_and_value, norm_heads, queries
from localkv.kernels.layer_weights import LayerWeights
from localkv.kernels.primitives import Primitives
from localkv.kernels.reference.attention import attention_reference
from localkv.kernels.store_kv import pack_groups, store_rotated


def attention_before_rope(
    p: Primitives,
    x: Tensor,
    layer: LayerWeights,
    spec: LayerSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    batch: Batch,
) -> Tensor:
    """As `Backend.mixers` has it."""
    weights, attn = layer.attention, spec.attention
    h = x if layer.attn_norm is None else p.norm(x, layer.attn_norm)
    q, gate = queries(p, h, weights, attn, inputs)
    if attn.kv_from is None:
        k, v = key_and_value(p, h, weights, attn)
        if weights.attn_k_norm is not None:
            k = norm_heads(p.norm, k, weights.attn_k_norm)
        store_rotated(p.store_kv, p.rotate, k, v, cache, cache.rows_of(batch))
        pack_groups(p.pack_groups, cache, cache.rows_of(batch))

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
    merged: Tensor = gated(merge_segments(parts, weights.sinks), gate)
    return merged


def lacks_before_rope(spec: LayerSpec) -> str:
    """What of a layer can't have K before RoPE, in words; empty if it can."""
    for mixer in (spec.mixer, spec.beside):
        if isinstance(mixer, LatentAttentionSpec):
            return "latents with K before RoPE"
        if isinstance(mixer, AttentionSpec) and mixer.norms_after_rope:
            return "K before RoPE where heads are normed after it"
    return ""
