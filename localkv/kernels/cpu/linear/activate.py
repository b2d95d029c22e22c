"""One activation of a feed-forward block, other than SwiGLU and GeGLU, which most models have.

Compiled for each activation, with a gate or without. Formulas as in `kernels/activation.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.linear.jobs import ActivationJob
from localkv.simd.activations import sigmoid
from localkv.simd.arithmetic import (
    add,
    exp,
    f32x16,
    fma,
    if_positive,
    maximum,
    mul,
    sub,
    sum_lanes,
    zero_f32,
)
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, load_f32, reader, store_f32, take_next

read_activation_job = reader(ActivationJob)

ACTIVATION = parameter("ACTIVATION", "relu")
GATED = parameter("GATED", False)
SPARSE = parameter("SPARSE", False)
LIMITED = parameter("LIMITED", False)
LIMITS_GATE = parameter("LIMITS_GATE", False)
LIMIT = np.float32(7.0)
"""gpt-oss's clamp."""


@njit
def minimum(x: Any, y: Any) -> Any:
    return sub(zero_f32(), maximum(sub(zero_f32(), x), sub(zero_f32(), y)))


@njit
def activation(x: Any, parameters: Address) -> Any:
    if ACTIVATION == "silu":
        return mul(x, sigmoid(x))
    if ACTIVATION == "gelu":
        linear, cubic = f32x16(np.float32(1.5957691216)), f32x16(np.float32(0.0713548163))
        return mul(x, sigmoid(mul(x, fma(cubic, mul(x, x), linear))))
    if ACTIVATION == "relu":
        return maximum(x, zero_f32())
    if ACTIVATION == "relu2":
        return mul(maximum(x, zero_f32()), maximum(x, zero_f32()))
    if ACTIVATION == "swiglu_oai":
        gate = minimum(x, f32x16(LIMIT))
        return mul(gate, sigmoid(mul(gate, f32x16(np.float32(1.702)))))
    alpha_p, alpha_n = f32x16(get_f32(parameters, 0)), f32x16(get_f32(parameters, 1))
    beta, eps = f32x16(get_f32(parameters, 2)), f32x16(get_f32(parameters, 3))
    grown = sub(exp(minimum(x, eps)), f32x16(np.float32(1)))
    positive, negative = mul(alpha_p, mul(x, x)), mul(alpha_n, sub(grown, x))
    return fma(beta, x, if_positive(x, positive, negative))


@njit
def threshold(x: Address, n: int, n_deviations: Any) -> Any:
    """The mean of n floats plus some of their standard deviations (over n - 1)."""
    total = zero_f32()
    for i in range(0, n, 16):
        total = add(total, load_f32(x, i))
    mean = sum_lanes(total) / np.float32(n)
    squares = zero_f32()
    for i in range(0, n, 16):
        off = sub(load_f32(x, i), f32x16(mean))
        squares = fma(off, off, squares)
    return mean + n_deviations * np.sqrt(sum_lanes(squares) / np.float32(n - 1))


@cfunc("void(int64, int64)", error_model="numpy")
def activate(address: Address, thread: Count) -> None:
    """x = activation(x), times `up` where it is gated (`ActivationJob`)."""
    job = read_activation_job(address)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        x, up = job.x + 4 * row * job.n, job.up + 4 * row * job.n
        least = f32x16(np.float32(0))
        if SPARSE:
            least = f32x16(threshold(x, job.n, get_f32(job.parameters, 0)))
        for i in range(0, job.n, 16):
            v = load_f32(x, i)
            if SPARSE:
                v = maximum(sub(v, least), zero_f32())
            if LIMITS_GATE:
                v = minimum(v, f32x16(get_f32(job.parameters, 0)))
            y = activation(v, job.parameters)
            if ACTIVATION == "swiglu_oai":
                limit = f32x16(LIMIT)
                other = maximum(minimum(load_f32(up, i), limit), sub(zero_f32(), limit))
                y = mul(y, add(other, f32x16(np.float32(1))))
            elif LIMITED:
                limit = f32x16(get_f32(job.parameters, 0))
                other = maximum(minimum(load_f32(up, i), limit), sub(zero_f32(), limit))
                y = mul(y if LIMITS_GATE else minimum(y, limit), other)
            elif GATED:
                y = mul(y, load_f32(up, i))
            store_f32(x, i, y)
