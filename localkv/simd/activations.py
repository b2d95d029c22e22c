"""Activations of 16 floats at once, which several kernels have."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.simd.arithmetic import (
    add,
    div,
    exp,
    f32x16,
    if_positive,
    log1p,
    maximum,
    sub,
    zero_f32,
)


@njit
def one_and_power(x: Any) -> Any:
    """1 + exp(-x); of the exponents above 88, exp(88), which is finite."""
    return add(f32x16(np.float32(1)), exp(sub(zero_f32(), maximum(x, f32x16(np.float32(-88))))))


@njit
def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return div(f32x16(np.float32(1)), one_and_power(x))


@njit
def silu(x: Any) -> Any:
    """x / (1 + exp(-x))."""
    return div(x, one_and_power(x))


@njit
def softplus(x: Any) -> Any:
    """log(1 + exp(x)), which is x above 20, as in llama.cpp."""
    most = f32x16(np.float32(20))
    lesser = sub(most, maximum(sub(most, x), zero_f32()))
    return if_positive(sub(x, most), x, log1p(exp(lesser)))
