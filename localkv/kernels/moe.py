"""Routed experts: which experts see a token, and their products on packed 3-D tensors."""

from __future__ import annotations

from collections.abc import Callable

from localkv.arch.ffn_spec import MlpSpec, MoeSpec
from localkv.cache.arrays import Array
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.layer_weights import Linear, MoeWeights
from localkv.kernels.namespace import namespace

MIN_WEIGHT_SUM = 2.0**-14
"""The selected weights' sum is never taken as less (llama.cpp, `build_moe_ffn`)."""


def route(router_logits: Array, moe: MoeSpec) -> tuple[Array, Array]:
    """Softmax over all experts, then the best few; of equal ones the first.

    Args:
        router_logits: [tokens, n_experts].

    Returns:
        expert ids int64 [tokens, n_experts_used] and their weights, same shape.
    """
    xp = namespace(router_logits)
    exps = xp.exp(router_logits - xp.amax(router_logits, axis=-1, keepdims=True))
    shares = exps / xp.sum(exps, axis=-1, keepdims=True)
    experts = xp.argsort(-shares, stable=True)[:, : moe.n_experts_used]
    weights = shares[xp.arange(len(shares))[:, None], experts]
    if moe.renormalise:
        total = xp.sum(weights, axis=-1, keepdims=True)
        weights = weights / xp.clip(total, MIN_WEIGHT_SUM, None)
    return experts, weights


def moe_mlp(
    x: Array,
    layer: MoeWeights,
    moe: MoeSpec,
    routed: Array | None = None,
    *,
    matmul: Callable[[Array, PackedTensor], Array],
    linear: Callable[[Array, Linear], Array],
    activate: Callable[[Array, Array | None, MlpSpec], Array],
) -> Array:
    """Weighted sum of the chosen experts' gated blocks, and the shared one: [tokens, n_embd].

    `matmul`, `linear` and `activate` are the backend's. The steps between them give each token
    the same alone as in any batch.

    Args:
        routed: [tokens, n_embd], what the router reads if that is not x.
    """
    xp = namespace(x)
    expert_spec = MlpSpec(moe.n_ff, moe.activation)
    experts, weights = route(linear(x if routed is None else routed, layer.ffn_gate_inp), moe)
    out = xp.zeros_like(x)
    for expert in sorted(set(experts.reshape(-1).tolist())):
        tokens, choice = xp.where(experts == expert)
        rows = x[tokens]
        gate = matmul(rows, layer.ffn_gate_exps[expert])
        up = matmul(rows, layer.ffn_up_exps[expert])
        down = matmul(activate(gate, up, expert_spec), layer.ffn_down_exps[expert])
        out[tokens] += down * weights[tokens, choice, None]  # a token has an expert once
    if layer.shared is not None:
        shared = layer.shared
        assert shared.ffn_gate is not None
        hidden = activate(linear(x, shared.ffn_gate), linear(x, shared.ffn_up), expert_spec)
        y = linear(hidden, shared.ffn_down)
        if layer.ffn_gate_inp_shexp is not None:
            gate = xp.sum(x * layer.ffn_gate_inp_shexp, axis=-1, keepdims=True)
            y = y / (1 + xp.exp(-gate))  # torch.sigmoid treats the last few tokens differently
        out += y
    return out
