"""The gated delta rule, composed (Yang et al. 2024, arXiv:2412.06464)."""

from __future__ import annotations

import math

from localkv.arch.spec import DeltaNetSpec, LayerSpec
from localkv.cache.arrays import Array, Batch, LayerCache
from localkv.kernels.activation import activated, sigmoid
from localkv.kernels.backend import TokenInputs
from localkv.kernels.causal_conv import causal_conv
from localkv.kernels.layer_weights import DeltaNetWeights, LayerWeights
from localkv.kernels.namespace import namespace
from localkv.kernels.recurrence import Recurrence

LINEAR_FROM = 20.0
"""softplus(x) is x from here on, as in llama.cpp."""


def softplus(x: Array) -> Array:
    """log(1 + exp(x))."""
    xp = namespace(x)
    return xp.where(x > LINEAR_FROM, x, xp.log1p(xp.exp(xp.clip(x, None, LINEAR_FROM))))


def unit_heads(x: Array, eps: float) -> Array:
    """x [tokens, heads, channels] with heads of length 1; eps is added to the sum of squares."""
    xp = namespace(x)
    return x / xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True) + eps)


def key_heads(x: Array, spec: DeltaNetSpec) -> Array:
    """Of key heads [tokens, n_key_heads, channels], those that the value heads use."""
    n_keys, n_values = spec.n_key_heads, spec.n_value_heads
    xp, times = namespace(x), n_values // n_keys
    heads = xp.arange(n_values)
    return x[:, heads % n_keys if spec.heads_in_turn else heads // times]


def delta_net(
    p: Recurrence,
    x: Array,
    layer: LayerWeights,
    spec: LayerSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    batch: Batch,
) -> Array:
    """As `Backend.mixers` has it."""
    weights, net, state = layer.mixer, spec.mixer, cache.state
    assert isinstance(weights, DeltaNetWeights)
    assert isinstance(net, DeltaNetSpec)
    assert state is not None
    xp = namespace(x)
    size, eps = net.head_dim, net.norm.eps
    h = x if layer.attn_norm is None else p.norm(x, layer.attn_norm)
    mixed = causal_conv(p.linear(h, weights.attn_qkv), weights.ssm_conv1d, state, batch)
    mixed = activated(mixed, "silu").reshape(len(x), -1, size)
    n_keys = net.n_key_heads
    q = key_heads(unit_heads(mixed[:, :n_keys], eps) / math.sqrt(size), net)
    k = key_heads(unit_heads(mixed[:, n_keys : 2 * n_keys], eps), net)
    v = mixed[:, 2 * n_keys :]
    beta = sigmoid(p.linear(h, weights.ssm_beta))
    rate = softplus(p.linear(h, weights.ssm_alpha) + weights.ssm_dt)
    decay = xp.exp(weights.ssm_a * rate)
    out = p.scan(q, k, v, decay, beta, state, batch)
    y = p.norm(out.reshape(-1, size), weights.ssm_norm).reshape(len(x), -1)
    return y * activated(p.linear(h, weights.attn_gate), "silu")
