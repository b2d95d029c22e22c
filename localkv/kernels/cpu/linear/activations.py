"""The CPU's work between products: norms, gating, RoPE. Rows of float32, at addresses.

A row's result does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.linear.read_activation_job import (
    read_gate_job,
    read_norm_job,
    read_rope_job,
)
from localkv.simd.arithmetic import (
    add,
    div,
    exp,
    f32x16,
    fma,
    maximum,
    mul,
    sub,
    sum_lanes,
    zero_f32,
)
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import (
    get_f32,
    load_f32,
    put_f32,
    store_f32,
    take_next,
)

PART = 1024
"""Values of a piece of work where rows do not matter."""


@njit
def norm_row(x: Address, n: int, weight: Address, eps: Any, out: Address) -> None:
    """RMSNorm of n floats; `out` may be `x`."""
    total = zero_f32()
    for i in range(n // 16):
        v = load_f32(x, 16 * i)
        total = fma(v, v, total)
    squares = sum_lanes(total)
    for i in range(n // 16 * 16, n):
        squares += get_f32(x, i) * get_f32(x, i)
    factor = np.float32(1) / np.sqrt(squares / np.float32(n) + eps)
    factors = f32x16(factor)
    for i in range(n // 16):
        y = mul(load_f32(x, 16 * i), factors)
        store_f32(out, 16 * i, mul(y, load_f32(weight, 16 * i)))
    for i in range(n // 16 * 16, n):
        put_f32(out, i, get_f32(x, i) * factor * get_f32(weight, i))


@cfunc("void(int64, int64)", error_model="numpy")
def norm(address: Address, thread: Count) -> None:
    """RMSNorm of rows (`NormJob`)."""
    job = read_norm_job(address)
    eps = get_f32(job.eps, 0)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        offset = 4 * row * job.n
        norm_row(job.x + offset, job.n, job.weight, eps, job.out + offset)


@njit
def centred_row(x: Address, n: int, out: Address) -> None:
    """n floats less their mean; `out` may be `x`."""
    total = zero_f32()
    for i in range(n // 16):
        total = add(total, load_f32(x, 16 * i))
    mean = sum_lanes(total)
    for i in range(n // 16 * 16, n):
        mean += get_f32(x, i)
    mean = mean / np.float32(n)
    means = f32x16(mean)
    for i in range(n // 16):
        store_f32(out, 16 * i, sub(load_f32(x, 16 * i), means))
    for i in range(n // 16 * 16, n):
        put_f32(out, i, get_f32(x, i) - mean)


@cfunc("void(int64, int64)", error_model="numpy")
def layer_norm(address: Address, thread: Count) -> None:
    """LayerNorm of rows (`NormJob`)."""
    job = read_norm_job(address)
    eps = get_f32(job.eps, 0)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        out = job.out + 4 * row * job.n
        centred_row(job.x + 4 * row * job.n, job.n, out)
        norm_row(out, job.n, job.weight, eps, out)
        if job.bias:
            for i in range(job.n):
                put_f32(out, i, get_f32(out, i) + get_f32(job.bias, i))


@cfunc("void(int64, int64)", error_model="numpy")
def geglu(address: Address, thread: Count) -> None:
    """gate = gelu(gate) * up (`GateJob`).

    The tanh form, as x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), since
    1 + tanh(u) is 2 / (1 + exp(-2 u)).
    """
    job = read_gate_job(address)
    one, lowest = f32x16(np.float32(1)), f32x16(np.float32(-88))  # exp(88) is finite
    linear, cubic = f32x16(np.float32(1.5957691216)), f32x16(np.float32(0.0713548163))
    while True:
        start = take_next(address) * PART
        if start >= job.n:
            break
        for at in range(start, min(start + PART, job.n), 16):
            x = load_f32(job.gate, at)
            twice_u = mul(x, fma(cubic, mul(x, x), linear))
            power = exp(sub(zero_f32(), maximum(twice_u, lowest)))
            store_f32(job.gate, at, mul(div(x, add(one, power)), load_f32(job.up, at)))


@cfunc("void(int64, int64)", error_model="numpy")
def swiglu(address: Address, thread: Count) -> None:
    """gate = silu(gate) * up (`GateJob`)."""
    job = read_gate_job(address)
    one, lowest = f32x16(np.float32(1)), f32x16(np.float32(-88))  # exp(88) is finite
    while True:
        start = take_next(address) * PART
        if start >= job.n:
            break
        for at in range(start, min(start + PART, job.n), 16):
            x = load_f32(job.gate, at)
            power = exp(sub(zero_f32(), maximum(x, lowest)))
            store_f32(job.gate, at, mul(div(x, add(one, power)), load_f32(job.up, at)))


@cfunc("void(int64, int64)", error_model="numpy")
def rope(address: Address, thread: Count) -> None:
    """RMSNorm of each head of tokens, then RoPE (`RopeJob`)."""
    job = read_rope_job(address)
    n_pairs = job.n_pairs
    apart = 1 if job.neighbours else n_pairs
    step = 2 if job.neighbours else 1
    while True:
        token = take_next(address)
        if token >= job.n_tokens:
            break
        cos, sin = job.cos + 4 * token * n_pairs, job.sin + 4 * token * n_pairs
        for head in range(job.n_heads):
            x = job.x + 4 * (token * job.n_heads + head) * job.head_dim
            if job.weight:
                norm_row(x, job.head_dim, job.weight, get_f32(job.eps, 0), x)
            for i in range(n_pairs):
                a, b = get_f32(x, step * i), get_f32(x, step * i + apart)
                c, s = get_f32(cos, i), get_f32(sin, i)
                put_f32(x, step * i, a * c - b * s)
                put_f32(x, step * i + apart, a * s + b * c)
