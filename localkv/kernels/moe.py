"""Routed experts: which experts see a token, and their products on packed 3-D tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localkv.arch.spec import MoeSpec
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.activation import gated
from localkv.kernels.layer_weights import Linear, MoeWeights
from localkv.kernels.linear import linear, matmul

MIN_WEIGHT_SUM = 2.0**-14
"""The selected weights' sum is never taken as less (llama.cpp, `build_moe_ffn`)."""


def route(router_logits: Tensor, moe: MoeSpec) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, then the best few.

    Args:
        router_logits: [tokens, n_experts].

    Returns:
        expert ids int64 [tokens, n_experts_used] and their weights, same shape.
    """
    weights, experts = router_logits.softmax(-1).topk(moe.n_experts_used, dim=-1)
    if moe.renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(MIN_WEIGHT_SUM)
    return experts, weights


def moe_mlp(
    x: Tensor,
    layer: MoeWeights,
    moe: MoeSpec,
    *,
    matmul: Callable[[Tensor, PackedTensor], Tensor] = matmul,
    linear: Callable[[Tensor, Linear], Tensor] = linear,
    gated: Callable[[Tensor, Tensor], Tensor] = gated,
) -> Tensor:
    """Weighted sum of the chosen experts' SwiGLU blocks, and the shared one: [tokens, n_embd].

    `matmul`, `linear` and `gated` are the backend's. Torch's own steps give each token the
    same alone as in any batch.
    """
    experts, weights = route(linear(x, layer.ffn_gate_inp), moe)
    out = torch.zeros_like(x)
    for expert in sorted(set(experts.flatten().tolist())):
        tokens, choice = torch.nonzero(experts == expert, as_tuple=True)
        rows = x[tokens]
        gate = matmul(rows, layer.ffn_gate_exps[expert])
        up = matmul(rows, layer.ffn_up_exps[expert])
        down = matmul(gated(gate, up), layer.ffn_down_exps[expert])
        out.index_add_(0, tokens, down * weights[tokens, choice, None])
    if layer.shared is not None:
        shared = layer.shared
        hidden = gated(linear(x, shared.ffn_gate), linear(x, shared.ffn_up))
        y = linear(hidden, shared.ffn_down)
        if layer.ffn_gate_inp_shexp is not None:
            gate = (x * layer.ffn_gate_inp_shexp).sum(-1, keepdim=True)
            y = y / (1 + torch.exp(-gate))  # torch.sigmoid treats the last few tokens differently
        out += y
    return out
