"""What feed-forward blocks make of a product: `kernels/activation.py` in registers."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from localkv.arch.spec import Activation, MlpSpec
from localkv.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT
from localkv.kernels.activation import softplus as softplus_of

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
def softplus(x):
    """log(1 + exp(x)), exact for small results, too (`log1p` as of Kahan); x itself from 20 on."""
    e = tl.exp(tl.minimum(x, 20.0))
    sum = 1.0 + e
    below = tl.where(sum == 1.0, e, tl.log(sum) * (e / tl.where(sum == 1.0, 1.0, sum - 1.0)))
    return tl.where(x > 20.0, x, below)


@triton.jit
def xielu(x, numbers):
    """See `XieluParams`; `numbers` as `activation_numbers` gives them."""
    alpha_p, alpha_n, beta, eps = numbers
    negative = (expm1(tl.minimum(x, eps)) - x) * alpha_n
    return tl.where(x > 0, alpha_p * x * x, negative) + beta * x


@triton.jit
def silu_gated(gate, up, numbers):
    return silu(gate, ()) * up


@triton.jit
def gelu_gated(gate, up, numbers):
    return gelu(gate, ()) * up


@triton.jit
def relu_gated(gate, up, numbers):
    return relu(gate, ()) * up


@triton.jit
def relu2_gated(gate, up, numbers):
    return relu2(gate, ()) * up


@triton.jit
def at_most(x, most):
    return tl.where(x > most, most, x)


@triton.jit
def between(x, most):
    """x between -`most` and `most`."""
    return tl.where(x < -most, -most, at_most(x, most))


@triton.jit
def silu_limited(gate, up, numbers):
    """The values of SiLU and of up are limited; see `MlpSpec.limit`."""
    return at_most(silu(gate, ()), numbers[0]) * between(up, numbers[0])


@triton.jit
def silu_of_limited(gate, up, numbers):
    """What SiLU reads is limited, as is up; see `MlpSpec.limits_gate`."""
    return silu(at_most(gate, numbers[0]), ()) * between(up, numbers[0])


@triton.jit
def swiglu_oai(gate, up, numbers):
    gate = at_most(gate, LIMIT)
    return gate / (1.0 + tl.exp(gate * -ALPHA)) * (between(up, LIMIT) + 1.0)


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
"""Epilogues of blocks with one: (gate's values, up's, `activation_numbers`)."""


def epilogue(spec: MlpSpec) -> Any:
    """The function of `GATED`, or the one with a limit, of a block with a gate."""
    if spec.limit:
        return silu_of_limited if spec.limits_gate else silu_limited
    return GATED[spec.activation]


def why_not(spec: MlpSpec) -> str:
    """What a block has that no kernel does, in words; empty if there is nothing."""
    if spec.activation not in (GATED if spec.gated else PLAIN):
        return f"{spec.activation} {'with' if spec.gated else 'without'} a gate"
    if spec.limit and not (spec.gated and spec.activation == "silu"):
        return f"{spec.activation} with a limit"
    return ""


def activation_numbers(spec: MlpSpec) -> tuple[float, ...]:
    """Parameters of the activation of a block."""
    if spec.limit:
        return (spec.limit,)
    if spec.xielu is None:
        return ()
    p = spec.xielu
    return softplus_of(p.alpha_p), p.beta + softplus_of(p.alpha_n), p.beta, p.eps
