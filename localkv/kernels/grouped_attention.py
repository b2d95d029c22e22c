"""Attention of grouped queries from primitives: projections, norms, RoPE, the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from localkv.arch.spec import AttentionSpec, LayerSpec
from localkv.cache.arrays import Array, Batch, LayerCache
from localkv.kernels.activation import sigmoid
from localkv.kernels.attention import attention
from localkv.kernels.backend import TokenInputs
from localkv.kernels.layer_weights import AttentionWeights, LayerWeights, Norm
from localkv.kernels.namespace import namespace
from localkv.kernels.primitives import Primitives
from localkv.kernels.store_kv import pack_groups, store_rotated

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
    """As `Backend.mixers` has it.

    Args:
        stores_turned: K is stored after RoPE, or else before it, as `attend` expects it.
    """
    weights, attn = layer.attention, spec.attention
    h = x if layer.attn_norm is None else p.norm(x, layer.attn_norm)
    q, gate = _queries(p, h, weights, attn, inputs)
    if attn.kv_from is None:
        k, v = _key_and_value(p, h, weights, attn)
        of_k = inputs if stores_turned else replace(inputs, rope=None)
        k = _turned(p, k, weights.attn_k_norm, attn, of_k)
        store_rotated(p.store_kv, p.rotate, k, v, cache, cache.rows_of(batch))
        pack_groups(p.pack_groups, cache, cache.rows_of(batch))
    out = attend(p, q, cache, batch, attn, weights, inputs)
    out = out.reshape(len(out), -1)
    return out if gate is None else out * sigmoid(gate)


def _queries(
    p: Primitives, h: Array, weights: AttentionWeights, attn: AttentionSpec, inputs: TokenInputs
) -> tuple[Array, Array | None]:
    """q of new tokens [tokens, n_heads, channels], and the gate of their outputs, if there is
    one."""
    q, gate = p.linear(h, weights.attn_q), None
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
    k = p.linear(h, weights.attn_k).reshape(-1, attn.n_kv_heads, attn.key_dim)
    v = k
    if not attn.value_from_key:
        assert weights.attn_v is not None
        v = p.linear(h, weights.attn_v).reshape(-1, attn.n_kv_heads, attn.value_dim)
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
