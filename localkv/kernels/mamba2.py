"""Mamba-2, composed (Dao & Gu 2024, arXiv:2405.21060).

After llama.cpp's `src/models/mamba-base.cpp` and `ggml_ssm_scan`.
"""

from __future__ import annotations

from dataclasses import replace

from localkv.arch.spec import LayerSpec, Mamba2Spec
from localkv.cache.arrays import Array, Batch, LayerCache
from localkv.kernels.activation import activated
from localkv.kernels.backend import TokenInputs
from localkv.kernels.causal_conv import causal_conv
from localkv.kernels.delta_net import softplus
from localkv.kernels.layer_weights import LayerWeights, Mamba2Weights, Norm
from localkv.kernels.namespace import namespace
from localkv.kernels.recurrence import Recurrence


def mamba2(
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
    assert isinstance(weights, Mamba2Weights)
    assert isinstance(net, Mamba2Spec)
    assert state is not None
    xp, n_tokens = namespace(x), len(x)
    h = x if layer.attn_norm is None else p.norm(x, layer.attn_norm)
    projected = p.linear(h, weights.ssm_in)
    width, end = net.width, net.width + net.conv_channels
    z, mixed, step = projected[:, :width], projected[:, width:end], projected[:, end:]
    mixed = causal_conv(mixed, weights.ssm_conv1d, state, batch)
    if weights.ssm_conv1d_bias is not None:
        mixed = mixed + weights.ssm_conv1d_bias
    mixed = activated(mixed, "silu")
    values = mixed[:, :width].reshape(n_tokens, net.n_heads, net.head_dim)
    times = net.n_heads // net.n_groups
    group = xp.arange(net.n_heads) // times
    both = mixed[:, width:].reshape(n_tokens, 2, net.n_groups, net.state_dim)
    b, c = both[:, 0][:, group], both[:, 1][:, group]
    length = softplus(step + weights.ssm_dt)
    decay = xp.exp(weights.ssm_a * length)
    scaled = values * length[:, :, None]
    out = p.scan(c, b, scaled, decay, None, state, batch)
    y = (out + values * weights.ssm_d[:, None]).reshape(n_tokens, width)
    y = y * activated(z, "silu")
    return y if weights.ssm_norm is None else group_norm(p, y, weights.ssm_norm, net.n_groups)


def group_norm(p: Recurrence, x: Array, norm: Norm, n_groups: int) -> Array:
    """Norm of each group of a row's channels [tokens, width], weight [width]."""
    if n_groups == 1:
        return p.norm(x, norm)
    xp, rows = namespace(x), x.reshape(-1, x.shape[-1] // n_groups)
    ones = replace(norm, weight=xp.ones_like(norm.weight[: rows.shape[-1]]))
    return p.norm(rows, ones).reshape(x.shape) * norm.weight
