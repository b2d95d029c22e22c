"""Routed experts: which experts see a token, and their products on packed 3-D tensors.

After llama.cpp's `build_moe_ffn` (`src/llama-graph.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from localkv.arch.spec import Gating, MlpSpec, MoeSpec
from localkv.cache.arrays import Array
from localkv.kernels.activation import sigmoid
from localkv.kernels.layer_weights import Linear, MoeWeights
from localkv.kernels.low_rank import Adapters
from localkv.kernels.namespace import namespace
from localkv.quant_formats.packed_tensor import PackedTensor

MIN_WEIGHT_SUM = 2.0**-14
"""The selected weights' sum is never taken as less."""

LARGE = 20.0
"""From here on softplus is the identity, as in ggml."""

ExpertProduct = Callable[[Array, PackedTensor, int], Array]
"""(rows [n, n_in], stack [n_experts, n_out, n_in], expert) -> its product [n, n_out]."""
Activate = Callable[[Array, Array | None, MlpSpec], Array]


def softmax(logits: Array) -> Array:
    """Along the last axis."""
    xp = namespace(logits)
    exps = xp.exp(logits - xp.amax(logits, axis=-1, keepdims=True))
    return exps / xp.sum(exps, axis=-1, keepdims=True)


def shares_of(logits: Array, gating: Gating) -> Array:
    """Every expert's share, from which chosen experts' weights are made; see `MoeSpec.gating`."""
    xp = namespace(logits)
    match gating:
        case "softmax":
            return softmax(logits)
        case "sigmoid":
            return sigmoid(logits)
        case "softmax_of_chosen":
            return logits
        case "sqrt_softplus":
            softplus = xp.log1p(xp.exp(xp.clip(logits, None, LARGE)))
            return xp.sqrt(xp.where(logits > LARGE, logits, softplus))


def of_best_groups(ranks: Array, moe: MoeSpec) -> Array:
    """`ranks`, but minus infinity for experts outside of the groups that a token may use.

    A group is as good as its two best experts together (DeepSeek-V3, arXiv:2412.19437).
    """
    xp = namespace(ranks)
    groups = ranks.reshape(len(ranks), moe.n_groups, -1)
    best_two = _taken(groups, _descending(groups)[..., :2])
    order = _descending(xp.sum(best_two, axis=-1))
    is_used = xp.argsort(order, stable=True) < moe.n_groups_used
    return xp.where(is_used[..., None], groups, -float("inf")).reshape(ranks.shape)


def _descending(x: Array) -> Array:
    """The order of values along the last axis, the largest first, of equal ones the first."""
    return namespace(x).argsort(-x, stable=True)


def _taken(x: Array, at: Array) -> Array:
    """The values at `at` along the last axis."""
    xp = namespace(x)
    return xp.take_along_axis(x, at, -1) if xp is np else xp.take_along_dim(x, at, -1)


def route(router_logits: Array, moe: MoeSpec, bias: Array | None = None) -> tuple[Array, Array]:
    """The best few experts of each token; of equal ones the first.

    Args:
        router_logits: [tokens, n_experts].
        bias: [n_experts], added for the choice, or None.

    Returns:
        expert ids int64 [tokens, n_experts_used] and their weights, same shape.
    """
    xp = namespace(router_logits)
    shares = shares_of(router_logits, moe.gating)
    if bias is not None:
        ranks = shares + bias
    elif moe.gating == "sigmoid" and moe.n_groups == 1:
        ranks = router_logits  # the same order, without the equal shares of large logits
    else:
        ranks = shares
    if moe.n_groups > 1:
        ranks = of_best_groups(ranks, moe)
    experts = _descending(ranks)[:, : moe.n_experts_used]
    weights = _taken(shares, experts)
    if moe.gating == "softmax_of_chosen":
        weights = softmax(weights)
    if moe.renormalise:
        total = xp.sum(weights, axis=-1, keepdims=True)
        weights = weights / xp.clip(total, MIN_WEIGHT_SUM, None)
    if moe.weights_scale != 1.0:
        weights = weights * moe.weights_scale
    return experts, weights


def moe_mlp(
    x: Array,
    layer: MoeWeights,
    moe: MoeSpec,
    routed: Array | None = None,
    *,
    product: ExpertProduct,
    linear: Callable[[Array, Linear], Array],
    activate: Activate,
) -> Array:
    """Weighted sum of the chosen experts' blocks, and the shared one: [tokens, n_embd].

    `product`, `linear` and `activate` are the backend's. The steps between them give each token
    the same alone as in any batch.

    Args:
        routed: what the router reads, if not x.
    """
    xp = namespace(x)
    logits = linear(x if routed is None else routed, layer.ffn_gate_inp)
    experts, weights = route(logits, moe, layer.exp_probs_b)
    read = x if layer.ffn_latent_down is None else linear(x, layer.ffn_latent_down)
    out = xp.zeros_like(read)
    for expert in sorted(set(experts.reshape(-1).tolist())):
        tokens, choice = xp.where(experts == expert)  # a token has an expert once
        rows, factors = read[tokens], weights[tokens, choice, None]
        if moe.weighs_input:
            rows = rows * factors
        hidden = _hidden(rows, expert, tokens, layer, moe, product, activate)
        y = product(hidden, layer.ffn_down_exps, expert)
        if layer.down_adapters is not None:
            y = layer.down_adapters.add(hidden, y, tokens=tokens, expert=expert)
        if layer.down_scale is not None:
            y = y * layer.down_scale[expert]
        if layer.down_bias is not None:
            y = y + layer.down_bias[expert]
        out[tokens] += y if moe.weighs_input else y * factors
    if layer.ffn_latent_up is not None:
        out = linear(out, layer.ffn_latent_up)
    if layer.shared is not None:
        out += _shared(x, layer, moe, linear, activate)
    return out


def _hidden(
    rows: Array,
    expert: int,
    tokens: Array,
    layer: MoeWeights,
    moe: MoeSpec,
    product: ExpertProduct,
    activate: Activate,
) -> Array:
    """The hidden rows of an expert's block: [rows, n_ff], of these tokens."""

    def times(stack: PackedTensor, bias: Array | None, adapters: Adapters | None) -> Array:
        y = product(rows, stack, expert)
        if adapters is not None:
            y = adapters.add(rows, y, tokens=tokens, expert=expert)
        return y if bias is None else y + bias[expert]

    spec = moe.expert
    if layer.ffn_gate_up_exps is not None:
        both = times(layer.ffn_gate_up_exps, layer.gate_up_bias, layer.gate_up_adapters)
        return activate(both[:, : moe.n_ff], both[:, moe.n_ff :], spec)
    assert layer.ffn_up_exps is not None
    up = times(layer.ffn_up_exps, layer.up_bias, layer.up_adapters)
    if layer.ffn_gate_exps is None:
        return activate(up, None, spec)
    gate = times(layer.ffn_gate_exps, layer.gate_bias, layer.gate_adapters)
    return activate(gate, up, spec)


def _shared(
    x: Array,
    layer: MoeWeights,
    moe: MoeSpec,
    linear: Callable[[Array, Linear], Array],
    activate: Activate,
) -> Array:
    """What the shared expert gives: [tokens, n_embd]."""
    shared = layer.shared
    assert shared is not None
    up = linear(x, shared.ffn_up)
    if shared.ffn_gate is None:
        hidden = activate(up, None, moe.shared)
    else:
        hidden = activate(linear(x, shared.ffn_gate), up, moe.shared)
    y = linear(hidden, shared.ffn_down)
    if moe.shared_scale != 1.0:
        y = y * moe.shared_scale
    if layer.ffn_gate_inp_shexp is not None:
        xp = namespace(x)
        gate = xp.sum(x * layer.ffn_gate_inp_shexp, axis=-1, keepdims=True)
        y = y / (1 + xp.exp(-gate))  # torch.sigmoid treats the last few tokens differently
    return y
