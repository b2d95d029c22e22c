"""The recurrent mixers, composed: a short convolution, the gated delta rule, Mamba-2.

They stand on a depthwise convolution over the last few tokens of a sequence, and on a scan over its
state, of NumPy's and torch's kind. Each token's result is the same in any chunks of its sequence.

    short_conv  LFM2's gated convolution
    delta_net   Yang et al. 2024, arXiv:2412.06464; with decays by channel Kimi Team 2025,
                arXiv:2510.26692, after llama.cpp's `src/models/kimi-linear.cpp`
    mamba2      Dao & Gu 2024, arXiv:2405.21060, after llama.cpp's `src/models/mamba-base.cpp` and
                `ggml_ssm_scan`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from localkv.arch.spec import DeltaNetSpec, LayerSpec, Mamba2Spec, Mixer, ShortConvSpec
from localkv.cache.arrays import Array, Batch, LayerCache, StateRows
from localkv.kernels.activation import activated, sigmoid
from localkv.kernels.backend import Mix, TokenInputs
from localkv.kernels.layer_weights import (
    DeltaNetWeights,
    LayerWeights,
    Linear,
    Mamba2Weights,
    Norm,
    ShortConvWeights,
)
from localkv.kernels.namespace import namespace


def sequences(batch: Batch) -> Iterator[tuple[slice, Array]]:
    """Each sequence's tokens and its slot, int64 [1]; nothing asks the device."""
    for i in range(len(batch.starts) - 1):
        yield slice(batch.starts[i], batch.starts[i + 1]), batch.slots[i : i + 1]


def keeps_between(state: StateRows, batch: Batch) -> bool:
    """Whether there are places for states after some of the tokens; nothing asks the device."""
    return len(state.data) > state.n_slots and batch.starts[-1] > len(batch.slots)


def causal_conv(x: Array, weight: Array, state: StateRows, batch: Batch) -> Array:
    """y[t] = sum over j of weight[:, j] * x[t - n + 1 + j], n the kernel's length; rows before the
    sequence's first are 0.

    Args:
        x: [tokens, channels].
        weight: [channels, n].
        state: the rows before the batch's, which are those after it then; those after each token
            are in its place.
    """
    xp = namespace(x)
    n_rows = weight.shape[1] - 1
    out = xp.empty_like(x)
    for tokens, slot in sequences(batch):
        rows = xp.concatenate((xp.asarray(state.rows[slot][0], dtype=x.dtype), x[tokens]))
        n = len(rows) - n_rows
        y = rows[:n] * weight[:, 0]
        for j in range(1, n_rows + 1):
            y = y + rows[j : j + n] * weight[:, j]
        out[tokens] = y
        for t in range(n if keeps_between(state, batch) else 0):
            after = batch.after[tokens.start + t]
            state.rows[after] = xp.asarray(rows[t + 1 : t + 1 + n_rows], dtype=xp.float32)
        state.rows[slot] = xp.asarray(rows[n:], dtype=xp.float32)[None]
    return out


Scan = Callable[[Array, Array, Array, Array, Array | None, StateRows, Batch], Array]
"""A function like `scan_by_token`."""


def scan_by_token(
    q: Array, k: Array, v: Array, decay: Array, beta: Array | None, state: StateRows, batch: Batch
) -> Array:
    """M <- decay * M; M <- M + k (x) added; out = M^T q, for each token. What is added is v, or
    beta * (v - M^T k), which is the delta rule.

    Args:
        q, k: [tokens, heads, rows of M].
        v: [tokens, heads, columns of M].
        decay: [tokens, heads], or [tokens, heads, rows of M].
        beta: [tokens, heads].
        state: whose memories are M before the batch, and after it then; those after each token are
            in its place.

    Returns:
        [tokens, heads, columns of M].
    """
    memories, xp, out = state.memory, namespace(v), namespace(v).empty_like(v)
    assert memories is not None
    for tokens, slot in sequences(batch):
        memory = memories[slot][0]
        for t in range(tokens.start, tokens.stop):
            memory = memory * decay[t].reshape(len(memory), -1, 1)
            key, added = k[t][:, :, None], v[t]
            if beta is not None:
                added = (added - xp.sum(memory * key, axis=1)) * beta[t][:, None]
            memory = memory + key * added[:, None]
            out[t] = xp.sum(memory * q[t][:, :, None], axis=1)
            if keeps_between(state, batch):
                memories[batch.after[t]] = xp.asarray(memory, dtype=xp.float32)
        memories[slot] = xp.asarray(memory, dtype=xp.float32)[None]
    return out


@dataclass(frozen=True)
class Recurrence:
    """Operations of one kind of array.

    Attributes:
        norm: of rows, along the last axis.
        linear: (x [tokens, n_in], matrix and bias) -> [tokens, n_out].
        scan: see `scan_by_token`.
    """

    norm: Callable[[Array, Norm], Array]
    linear: Callable[[Array, Linear], Array]
    scan: Scan = scan_by_token


def short_conv(
    p: Recurrence,
    x: Array,
    layer: LayerWeights,
    spec: LayerSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    batch: Batch,
) -> Array:
    """Mix tokens by a short convolution: c * conv(b * values)."""
    weights, conv, state = layer.mixer, spec.mixer, cache.state
    assert isinstance(weights, ShortConvWeights)
    assert isinstance(conv, ShortConvSpec)
    assert state is not None
    h = x if layer.attn_norm is None else p.norm(x, layer.attn_norm)
    parts = p.linear(h, weights.in_proj).reshape(len(x), 3, conv.width)
    b, c, values = parts[:, 0], parts[:, 1], parts[:, 2]
    return c * causal_conv(b * values, weights.conv, state, batch)


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
    """The key heads that the value heads use, of [tokens, n_key_heads, channels]."""
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
    """Mix tokens by a gated delta rule, as one of `Backend.mixers`."""
    weights, net, state = layer.mixer, spec.mixer, cache.state
    assert isinstance(weights, DeltaNetWeights)
    assert isinstance(net, DeltaNetSpec)
    assert state is not None
    xp = namespace(x)
    size, eps = net.head_dim, net.norm.eps
    h = x if layer.attn_norm is None else p.norm(x, layer.attn_norm)
    products = delta_products(p.linear, h, weights)
    mixed = causal_conv(products["mixed"], weights.ssm_conv1d, state, batch)
    mixed = activated(mixed, "silu").reshape(len(x), -1, size)
    n_keys = net.n_key_heads
    q = key_heads(unit_heads(mixed[:, :n_keys], eps) / math.sqrt(size), net)
    k = key_heads(unit_heads(mixed[:, n_keys : 2 * n_keys], eps), net)
    v = mixed[:, 2 * n_keys :]
    beta = sigmoid(products["beta"])
    alpha = products["alpha"] + weights.ssm_dt
    decay = xp.exp(log_decay(alpha.reshape(len(x), net.n_value_heads, -1), weights.ssm_a, net))
    out = p.scan(q, k, v, decay if net.fades_by_channel else decay[..., 0], beta, state, batch)
    y = p.norm(out.reshape(-1, size), weights.ssm_norm).reshape(len(x), -1)
    z = products["z"]
    return y * (sigmoid(z) if net.gate_activation == "sigmoid" else activated(z, "silu"))


def delta_products(
    linear: Callable[[Array, Linear], Array], h: Array, weights: DeltaNetWeights
) -> dict[str, Array]:
    """What a delta net makes of normed rows: "mixed" rows of q, k and v, "z", "beta", "alpha"."""
    mixed = linear(h, weights.attn_qkv)
    if weights.attn_k is not None and weights.attn_v is not None:
        parts = (mixed, linear(h, weights.attn_k), linear(h, weights.attn_v))
        mixed = namespace(mixed).concatenate(parts, -1)
    of_alpha = h if weights.ssm_f_a is None else linear(h, weights.ssm_f_a)
    of_gate = h if weights.ssm_g_a is None else linear(h, weights.ssm_g_a)
    return {
        "mixed": mixed,
        "z": linear(of_gate, weights.attn_gate),
        "beta": linear(h, weights.ssm_beta),
        "alpha": linear(of_alpha, weights.ssm_alpha),
    }


def log_decay(alpha: Array, a: Array, net: DeltaNetSpec) -> Array:
    """Logarithms of decays, of [tokens, heads, rows or 1], to which dt was added, and a [heads]."""
    if net.least_log_decay:
        return net.least_log_decay * sigmoid(a[:, None] * alpha)
    return a[:, None] * softplus(alpha)


def mamba2(
    p: Recurrence,
    x: Array,
    layer: LayerWeights,
    spec: LayerSpec,
    inputs: TokenInputs,
    cache: LayerCache,
    batch: Batch,
) -> Array:
    """Mix tokens by Mamba 2's state space, as one of `Backend.mixers`."""
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


def recurrent_mixers(operations: Recurrence) -> dict[type[Mixer], Mix]:
    """See `Backend.mixers`."""
    return {
        DeltaNetSpec: partial(delta_net, operations),
        ShortConvSpec: partial(short_conv, operations),
        Mamba2Spec: partial(mamba2, operations),
    }
