"""Activations of feed-forward blocks, and their gating (Shazeer 2020), of NumPy's and torch's kind.

Each value's result is the same alone as in any batch.
"""

from __future__ import annotations

import math

from localkv.arch.spec import Activation, MlpSpec, XieluParams
from localkv.cache.arrays import Array
from localkv.kernels.namespace import namespace

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
"""gpt-oss's clamp and slope (llama.cpp's `LLM_FFN_SWIGLU_OAI_MOE`)."""


def activate(hidden: Array, up: Array | None, mlp: MlpSpec) -> Array:
    """activation(hidden) * up, elementwise.

    Args:
        hidden: [tokens, n_ff], what the gate gave; in a block without a gate, what `up` gave.
        up: [tokens, n_ff], or None in a block without a gate.
    """
    xp = namespace(hidden)
    if mlp.activation == "swiglu_oai":
        gate = xp.clip(hidden, None, SWIGLU_LIMIT)
        return (
            gate * sigmoid(SWIGLU_ALPHA * gate) * (xp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT) + 1.0)
        )
    if mlp.limit and mlp.limits_gate:
        hidden = xp.clip(hidden, None, mlp.limit)
    if mlp.sparsity:
        hidden = sparse(hidden, mlp.sparsity)
    y = xielu(hidden, mlp.xielu) if mlp.xielu is not None else activated(hidden, mlp.activation)
    if mlp.limit:
        up = xp.clip(up, -mlp.limit, mlp.limit)
        y = y if mlp.limits_gate else xp.clip(y, None, mlp.limit)
    return y if up is None else y * up


def activated(x: Array, activation: Activation) -> Array:
    """An activation without parameters."""
    xp = namespace(x)
    match activation:
        case "silu":
            return x * sigmoid(x)
        case "gelu":
            turn = math.sqrt(2.0 / math.pi) * x * (1.0 + 0.044715 * x * x)
            return 0.5 * x * (1.0 + xp.tanh(turn))
        case "relu":
            return xp.clip(x, 0.0, None)
        case "relu2":
            return xp.clip(x, 0.0, None) ** 2
    raise ValueError(f"{activation} has parameters, or exists only gated")


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)); torch.sigmoid treats the last few values differently."""
    xp = namespace(x)
    return 1.0 / (1.0 + xp.exp(-xp.clip(x, -80.0, None)))


def softplus(x: float) -> float:
    """log(1 + exp(x)), as llama.cpp takes it of a model's parameters."""
    return x if x > 20.0 else math.log1p(math.exp(x))


def xielu(x: Array, params: XieluParams) -> Array:
    """See `XieluParams`."""
    xp = namespace(x)
    alpha_p, alpha_n = softplus(params.alpha_p), params.beta + softplus(params.alpha_n)
    negative = (xp.expm1(xp.clip(x, None, params.eps)) - x) * alpha_n
    return xp.where(x > 0, alpha_p * x * x, negative) + params.beta * x


def sparse(x: Array, n_deviations: float) -> Array:
    """relu(x - mean - `n_deviations` standard deviations), over each row; see `MlpSpec`."""
    xp = namespace(x)
    mean = xp.mean(x, axis=-1, keepdims=True)
    variance = xp.sum((x - mean) ** 2, axis=-1, keepdims=True) / (x.shape[-1] - 1)
    return xp.clip(x - (mean + n_deviations * xp.sqrt(variance)), 0.0, None)
