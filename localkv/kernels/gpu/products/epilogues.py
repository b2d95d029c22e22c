"""What feed-forward blocks make of a product: `kernels/activation.py` in registers."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from localkv.arch.spec import Activation, MlpSpec
from localkv.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, softplus

LIMIT, ALPHA = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_ALPHA)


@triton.jit
def silu(x, numbers):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x, numbers):
    """The tanh form; 1 + tanh(u) is 2 / (1 + exp(-2 u))."""
    return x / (1.0 + tl.exp(-1.5957691216 * x * (1.0 + 0.044715 * x * x)))


@triton.jit
def relu(x, numbers):
    return tl.where(x < 0, 0.0, x)


@triton.jit
def relu2(x, numbers):
    positive = relu(x, numbers)
    return positive * positive


@triton.jit
def expm1(x):
    """exp(x) - 1 of x <= 0, to a few units of the last place; near 0 by its series."""
    series = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * 0.008333334))))
    return tl.where(x > -0.15, series, tl.exp(x) - 1.0)


@triton.jit
def xielu(x, numbers):
    """See `XieluParams`; `numbers` as `activation_numbers` gives them."""
    alpha_p, alpha_n, beta, eps = numbers
    negative = (expm1(tl.minimum(x, eps)) - x) * alpha_n
    return tl.where(x > 0, alpha_p * x * x, negative) + beta * x


@triton.jit
def silu_gated(gate, up):
    return silu(gate, ()) * up


@triton.jit
def gelu_gated(gate, up):
    return gelu(gate, ()) * up


@triton.jit
def relu_gated(gate, up):
    return relu(gate, ()) * up


@triton.jit
def relu2_gated(gate, up):
    return relu2(gate, ()) * up


@triton.jit
def swiglu_oai(gate, up):
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate / (1.0 + tl.exp(gate * -ALPHA)) * (up + 1.0)


PLAIN: dict[Activation, Any] = {
    "silu": silu,
    "gelu": gelu,
    "relu": relu,
    "relu2": relu2,
    "xielu": xielu,
}
"""Epilogues of blocks without a gate: (values, `activation_numbers`)."""
GATED: dict[Activation, Any] = {
    "silu": silu_gated,
    "gelu": gelu_gated,
    "relu": relu_gated,
    "relu2": relu2_gated,
    "swiglu_oai": swiglu_oai,
}
"""Epilogues of blocks with one: (gate's values, up's)."""


def activation_numbers(spec: MlpSpec) -> tuple[float, ...]:
    """Parameters of the activation of a block without a gate."""
    if spec.xielu is None:
        return ()
    p = spec.xielu
    return softplus(p.alpha_p), p.beta + softplus(p.alpha_n), p.beta, p.eps
