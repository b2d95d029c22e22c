"""Attention over latents (DeepSeek-V2, arXiv:2405.04434, section 2.1) from primitives.

A token's row in the cache is one latent for all heads, which is both what keys are made of and
what values are, and one rotated part of a key. Matrices that make a head's key and value of the
latent are multiplied into q and into the output instead ("absorbed"):

    q' = k_b[h] q      logit = s (q' . latent + q_rotated . rotated)      out = v_b[h] sum p latent

so attention runs on rows as they are stored, whatever the number of heads.
"""

from __future__ import annotations

from collections.abc import Callable

from localkv.arch.spec import AttentionParams, LatentAttentionSpec, LayerSpec
from localkv.cache.arrays import Array, Batch, LayerCache, Segment, SegmentBatch
from localkv.kernels.attention import Merge, Rotate, merge_segments
from localkv.kernels.backend import TokenInputs
from localkv.kernels.layer_weights import LatentAttentionWeights, LayerWeights
from localkv.kernels.primitives import Primitives
from localkv.kernels.store_kv import pack_groups, store_rotated

SegmentLatents = Callable[
    [Array, Array, Segment, SegmentBatch, Batch, AttentionParams], tuple[Array, Array]
]
"""(q' [tokens, n_heads, latent_dim], q_rotated [tokens, n_heads, rope_dim], segment, its batch,
batch, params) -> sums of latents [tokens, n_heads, latent_dim] and log-sum-exp [tokens, n_heads].
K's planes hold the latents, V's the rotated parts. Of a token that sees no row of the segment they
are 0 and minus infinity."""


def latent_attention(
    p: Primitives,
    x: Array,
    layer: LayerWeights,
    spec: LayerSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    batch: Batch,
) -> Array:
    """As `Backend.mixers` has it."""
    weights, attn = layer.mixer, spec.mixer
    assert isinstance(weights, LatentAttentionWeights)
    assert isinstance(attn, LatentAttentionSpec)
    h = x if layer.attn_norm is None else p.norm(x, layer.attn_norm)
    store_latents(p, h, weights, attn, inputs, cache, batch)
    plain, rotated = queries(p, h, weights, attn, inputs)
    absorbed = p.head_products(plain, weights.attn_k_b)
    out = attend(p.latents, absorbed, rotated, cache, batch, attn.params, rotate=p.rotate)
    return p.head_products(out, weights.attn_v_b).reshape(len(x), -1)


def queries(
    p: Primitives,
    h: Array,
    weights: LatentAttentionWeights,
    attn: LatentAttentionSpec,
    inputs: TokenInputs,
) -> tuple[Array, Array]:
    """Each head's part without RoPE [tokens, n_heads, nope_dim], and its rotated part."""
    if weights.attn_q_a is not None:
        assert weights.attn_q_a_norm is not None
        h = p.norm(p.linear(h, weights.attn_q_a), weights.attn_q_a_norm)
    q = p.linear(h, weights.attn_q).reshape(-1, attn.n_heads, attn.nope_dim + attn.rope_dim)
    if inputs.q_scale is not None:
        q = q * inputs.q_scale[:, None, None]
    plain, rotated = q[..., : attn.nope_dim], q[..., attn.nope_dim :]
    return plain, rotated if inputs.rope is None else p.apply_rope(rotated, inputs.rope)


def store_latents(
    p: Primitives,
    h: Array,
    weights: LatentAttentionWeights,
    attn: LatentAttentionSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    batch: Batch,
) -> None:
    """Put the tokens' latents, normed, and the rotated parts of their keys in the cache."""
    row = p.linear(h, weights.attn_kv_a_mqa)
    latent, rotated = row[:, : attn.latent_dim], row[:, None, attn.latent_dim :]
    latent = p.norm(latent, weights.attn_kv_a_norm)[:, None]
    if inputs.rope is not None:
        rotated = p.apply_rope(rotated, inputs.rope)
    store_rotated(p.store_kv, p.rotate, latent, rotated, cache, cache.rows_of(batch))
    pack_groups(p.pack_groups, cache, cache.rows_of(batch))


def attend(
    run: SegmentLatents,
    q: Array,
    q_rotated: Array,
    cache: LayerCache,
    batch: Batch,
    params: AttentionParams,
    *,
    rotate: Rotate,
    merge: Merge = merge_segments,
) -> Array:
    """Sums of latents over all segments: [tokens, n_heads, latent_dim].

    The Hadamard matrix of a segment's latents meets q' before and the output after; that of the
    other part is its own, so that neither spreads into the other. Scales are applied alike.
    """
    parts = []
    for segment, seg_batch in zip(cache.segments, cache.rows_of(batch), strict=True):
        q_latent = rotate(q, segment.rotation_k)
        q_other = rotate(q_rotated, segment.rotation_v)
        if segment.scale_k is not None:
            q_latent = q_latent * segment.scale_k
        if segment.scale_v is not None:
            q_other = q_other * segment.scale_v
        out, lse = run(q_latent, q_other, segment, seg_batch, batch, params)
        if segment.scale_k is not None:
            out = out * segment.scale_k
        parts.append((rotate(out, segment.rotation_k), lse))
    return merge(parts, None)
