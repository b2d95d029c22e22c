"""Attention as a layer's mixer, from primitives: of grouped queries, to both sides, over latents.

Grouped queries take projections, norms, RoPE and the store; in encoders nothing is stored. Latents
are DeepSeek-V2's (arXiv:2405.04434, section 2.1).

A token's row in the cache is one latent for all heads, and one rotated part of a key. The latent is
both what keys are made of and what values are. Matrices that make a head's key and value of the
latent are multiplied into q and into the output instead ("absorbed"):

    q' = k_b[h] q      logit = s (q' . latent + q_rotated . rotated)      out = v_b[h] sum p latent

so attention runs on rows as they are stored, whatever the number of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from localkv.arch.spec import (
    AttentionParams,
    AttentionSpec,
    EncoderAttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
)
from localkv.cache.arrays import Array, Batch, LayerCache, Segment, SegmentBatch
from localkv.kernels.activation import sigmoid
from localkv.kernels.attention import (
    Merge,
    Rotate,
    attention,
    merge_segments,
    pack_groups,
    store_rotated,
)
from localkv.kernels.backend import TokenInputs
from localkv.kernels.footprint import MOST_LOGITS
from localkv.kernels.layer_weights import (
    AttentionWeights,
    LatentAttentionWeights,
    LayerWeights,
    Norm,
)
from localkv.kernels.namespace import namespace
from localkv.kernels.primitives import Primitives
from localkv.kernels.recurrent import softplus

Attend = Callable[
    [Primitives, Array, LayerCache, Batch, AttentionSpec, AttentionWeights, TokenInputs], Array
]
"""(primitives, q, cache, batch, attention, its weights, inputs) -> [tokens, n_heads, channels]."""


def attend_after_rope(
    p: Primitives,
    q: Array,
    cache: LayerCache,
    batch: Batch,
    attn: AttentionSpec,
    weights: AttentionWeights,
    inputs: TokenInputs,
) -> Array:
    """K is in the cache as q meets it."""
    return attention(p.attention, q, cache, batch, attn.params, weights.sinks, rotate=p.rotate)


def grouped_attention(
    p: Primitives,
    x: Array,
    layer: LayerWeights,
    spec: LayerSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    batch: Batch,
    *,
    attend: Attend = attend_after_rope,
    stores_turned: bool = True,
) -> Array:
    """Mix tokens by attention, as one of `Backend.mixers`.

    Args:
        stores_turned: K is stored after RoPE, or else before it, as `attend` expects it.
    """
    weights, attn = layer.attention, spec.attention
    h = x if layer.attn_norm is None else p.norm(x, layer.attn_norm)
    q, gate = grouped_queries(p, h, weights, attn, inputs)
    if attn.kv_from is None:
        k, v = _key_and_value(p, h, weights, attn)
        of_k = inputs if stores_turned else replace(inputs, rope=None)
        k = _turned(p, k, weights.attn_k_norm, attn, of_k)
        v = widened(v, attn.stored_value_dim)
        store_rotated(p.store_kv, p.rotate, k, v, cache, cache.rows_of(batch))
        pack_groups(p.pack_groups, cache, cache.rows_of(batch))
    out = attend(p, q, cache, batch, attn, weights, inputs)[..., : attn.value_dim]
    if weights.attn_gate is not None:
        out = out * gate_values(p.linear(h, weights.attn_gate), attn)[:, :, None]
    if attn.output_scale != 1.0:
        out = out * attn.output_scale
    out = out.reshape(len(out), -1)
    return out if gate is None else out * gate_values(gate, attn)


def widened(v: Array, width: int) -> Array:
    """Heads of V [tokens, n_kv_heads, channels], ending in zeros where they are narrower."""
    if v.shape[-1] == width:
        return v
    xp = namespace(v)
    zeros = xp.zeros_like(v)
    copies = [v, *[zeros] * -(-width // v.shape[-1])]
    return xp.concatenate(copies, -1)[..., :width]


def clamped(x: Array, attn: AttentionSpec) -> Array:
    """q, k or v as it is projected; see `AttentionSpec.clamp`."""
    clipped: Array = namespace(x).clip(x, -attn.clamp, attn.clamp) if attn.clamp else x
    return clipped


def gate_values(gate: Array, attn: AttentionSpec) -> Array:
    """What attention's output is multiplied with."""
    return softplus(gate) if attn.gate_activation == "softplus" else sigmoid(gate)


def grouped_queries(
    p: Primitives, h: Array, weights: AttentionWeights, attn: AttentionSpec, inputs: TokenInputs
) -> tuple[Array, Array | None]:
    """q of new tokens [tokens, n_heads, channels], and the gate of their outputs, if there is
    one."""
    q, gate = clamped(p.linear(h, weights.attn_q), attn), None
    if attn.gated:
        both = q.reshape(-1, attn.n_heads, 2, attn.key_dim)
        q, gate = both[:, :, 0], both[:, :, 1].reshape(-1, attn.width)
    q = _turned(p, q.reshape(-1, attn.n_heads, attn.key_dim), weights.attn_q_norm, attn, inputs)
    return q if inputs.q_scale is None else q * inputs.q_scale[:, None, None], gate


def _key_and_value(
    p: Primitives, h: Array, weights: AttentionWeights, attn: AttentionSpec
) -> tuple[Array, Array]:
    """K, neither normed nor rotated, and V of new tokens: [tokens, n_kv_heads, channels]."""
    assert weights.attn_k is not None
    k = clamped(p.linear(h, weights.attn_k), attn).reshape(-1, attn.n_kv_heads, attn.key_dim)
    v = k
    if not attn.value_from_key:
        assert weights.attn_v is not None
        v = clamped(p.linear(h, weights.attn_v), attn)
        v = v.reshape(-1, attn.n_kv_heads, attn.value_dim)
    if weights.v_norm is not None:
        v = norm_heads(p.norm, v, weights.v_norm)
    return k, v


def _turned(
    p: Primitives, x: Array, norm: Norm | None, attn: AttentionSpec, inputs: TokenInputs
) -> Array:
    """q or k [tokens, heads, channels], normed and rotated as the layer says."""
    if norm is not None and not attn.norms_after_rope:
        x = norm_heads(p.norm, x, norm)
    if inputs.rope is not None:
        x = p.apply_rope(x, inputs.rope)
    if norm is not None and attn.norms_after_rope:
        x = norm_heads(p.norm, x, norm)
    return x


def norm_heads(run: Callable[[Array, Norm], Array], x: Array, norm: Norm) -> Array:
    """Norm of q or k [tokens, heads, channels] over what its span says; `run` norms rows."""
    match norm.spec.span:
        case "head":
            return run(x, norm)
        case "row":
            return run(x.reshape(len(x), -1), norm).reshape(x.shape)
    xp = namespace(x)
    return run(x, Norm(norm.spec, xp.ones_like(norm.weight[0]))) * norm.weight


SMALL_PRODUCT, KEYS_AT_ONCE = 1 << 18, 128
"""Multiplications of a product that OpenBLAS does on the thread that asks for it: its own threads
would take several times as long, and heed no `-t`. As many keys are read at a time."""


def attend_texts(
    q: Array, k: Array, v: Array, starts: Sequence[int], spec: EncoderAttentionSpec
) -> Array:
    """Attention to both sides: each token of a text sees all of its text, and nothing is stored.

    The textbook's softmax(q . k) v. Logits are made for some queries at a time, so that a long text
    has no more than `MOST_LOGITS` of them in memory.

    Args:
        q: [tokens, n_heads, key_dim].
        k, v: [tokens, n_kv_heads, channels].
        starts: the tokens where texts begin, and the end of the last.
        spec: the layer's attention.

    Returns:
        [tokens, n_heads, value_dim].
    """
    xp, attn = namespace(q), spec.attention
    out = xp.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype)
    most = SMALL_PRODUCT // (KEYS_AT_ONCE * max(q.shape[-1], v.shape[-1]))
    for first, end in pairwise(starts):
        keys, values = (_by_head(rows[first:end], attn) for rows in (k, v))
        n = max(1, min(most, MOST_LOGITS // (attn.n_heads * (end - first))))
        for at in range(first, end, n):
            some = slice(at, min(at + n, end))
            heads = _attended(xp.moveaxis(q[some], 0, 1), keys, values, at - first, spec)
            out[some] = xp.moveaxis(heads, 0, 1)
    return out


def _by_head(rows: Array, attn: AttentionSpec) -> Array:
    """K or V of a text as each head of q reads it: [n_heads, tokens, channels]."""
    heads = namespace(rows).moveaxis(rows, 0, 1)
    group = attn.n_heads // attn.n_kv_heads
    return (
        heads
        if group == 1
        else namespace(rows).stack([heads] * group, 1).reshape(attn.n_heads, *heads.shape[1:])
    )


def _attended(q: Array, k: Array, v: Array, first: int, spec: EncoderAttentionSpec) -> Array:
    """Queries [n_heads, n, channels] of a text, the first of them its token `first`."""
    xp, params, n_keys = namespace(q), spec.attention.params, k.shape[-2]
    q = q * params.softmax_scale
    logits = xp.empty((*q.shape[:2], n_keys), dtype=q.dtype)
    tiles = [slice(at, at + KEYS_AT_ONCE) for at in range(0, n_keys, KEYS_AT_ONCE)]
    for tile in tiles:
        logits[..., tile] = xp.matmul(q, xp.swapaxes(k[:, tile], -1, -2))
    if params.window or params.alibi:
        apart = abs(xp.arange(k.shape[-2]) - (xp.arange(q.shape[-2]) + first)[:, None])
        if params.alibi:
            slopes = xp.asarray(params.slopes(len(q)), dtype=q.dtype)
            logits -= slopes[:, None, None] * xp.asarray(apart, dtype=q.dtype)
        if params.window:
            logits[:, apart > params.window // 2] = -xp.inf
    logits -= xp.amax(logits, axis=-1, keepdims=True)
    weights = xp.exp(logits)
    out = xp.matmul(weights[..., tiles[0]], v[:, tiles[0]])
    for tile in tiles[1:]:
        out += xp.matmul(weights[..., tile], v[:, tile])
    return out / xp.sum(weights, axis=-1, keepdims=True)


def encoder_attention(
    p: Primitives,
    x: Array,
    layer: LayerWeights,
    spec: LayerSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    batch: Batch,
) -> Array:
    """Mix the tokens of each text, as one of `Backend.mixers`."""
    assert isinstance(spec.mixer, EncoderAttentionSpec)
    weights, attn = layer.attention, spec.mixer.attention
    h = x if layer.attn_norm is None else p.norm(x, layer.attn_norm)
    q, _ = grouped_queries(p, h, weights, attn, inputs)
    k, v = _key_and_value(p, h, weights, attn)
    k = _turned(p, k, weights.attn_k_norm, attn, inputs)
    return attend_texts(q, k, v, batch.starts, spec.mixer).reshape(len(x), -1)


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
    """Mix tokens by attention, as one of `Backend.mixers`."""
    weights, attn = layer.mixer, spec.mixer
    assert isinstance(weights, LatentAttentionWeights)
    assert isinstance(attn, LatentAttentionSpec)
    h = x if layer.attn_norm is None else p.norm(x, layer.attn_norm)
    store_latents(p, h, weights, attn, inputs, cache, batch)
    plain, rotated = queries(p, h, weights, attn, inputs)
    absorbed = p.head_products(plain, weights.attn_k_b)
    out = attend(p.latents, absorbed, rotated, cache, batch, attn.params, rotate=p.rotate)
    values = p.head_products(out, weights.attn_v_b)
    if weights.attn_gate is not None:
        values = values * sigmoid(p.linear(h, weights.attn_gate))[:, :, None]
    return values.reshape(len(x), -1)


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

    The Hadamard matrix of a segment's latents meets q' before and the output after; the
    other part has its own, so that neither spreads into the other. Scales are applied alike.
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
