"""The CPU's work between products: norms, gating, RoPE. Rows of float32, at addresses.

A row's result does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.linear.jobs import GateJob, NormJob, RopeJob
from localkv.kernels.cpu.linear.row_norm import centred_row, norm_row, turn_row
from localkv.simd.activations import one_and_power, silu
from localkv.simd.arithmetic import div, f32x16, fma, mul
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, load_f32, put_f32, reader, store_f32, take_next

read_gate_job = reader(GateJob)
read_norm_job = reader(NormJob)
read_rope_job = reader(RopeJob)

PART = 1024
"""Values of a piece of work where rows do not matter."""


@njit
def add_bias(x: Address, n: int, bias: Address) -> None:
    for i in range(n):
        put_f32(x, i, get_f32(x, i) + get_f32(bias, i))


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
        if job.bias:
            add_bias(job.out + offset, job.n, job.bias)


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
            add_bias(out, job.n, job.bias)


@cfunc("void(int64, int64)", error_model="numpy")
def geglu(address: Address, thread: Count) -> None:
    """gate = gelu(gate) * up (`GateJob`).

    The tanh form, as x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), since
    1 + tanh(u) is 2 / (1 + exp(-2 u)).
    """
    job = read_gate_job(address)
    linear, cubic = f32x16(np.float32(1.5957691216)), f32x16(np.float32(0.0713548163))
    while True:
        start = take_next(address) * PART
        if start >= job.n:
            break
        for at in range(start, min(start + PART, job.n), 16):
            x = load_f32(job.gate, at)
            twice_u = mul(x, fma(cubic, mul(x, x), linear))
            store_f32(job.gate, at, mul(div(x, one_and_power(twice_u)), load_f32(job.up, at)))


@cfunc("void(int64, int64)", error_model="numpy")
def swiglu(address: Address, thread: Count) -> None:
    """gate = silu(gate) * up (`GateJob`)."""
    job = read_gate_job(address)
    while True:
        start = take_next(address) * PART
        if start >= job.n:
            break
        for at in range(start, min(start + PART, job.n), 16):
            store_f32(job.gate, at, mul(silu(load_f32(job.gate, at)), load_f32(job.up, at)))


@njit
def norm_head(job: Any, head: int, x: Address) -> None:
    """The norm of one head, in place."""
    if job.centred:
        centred_row(x, job.head_dim, x)
    weight = job.weight + head * job.weight_stride
    norm_row(x, job.head_dim, weight, get_f32(job.eps, 0), x)


@cfunc("void(int64, int64)", error_model="numpy")
def rope(address: Address, thread: Count) -> None:
    """A norm of each head of tokens, and RoPE (`RopeJob`)."""
    job = read_rope_job(address)
    n_pairs = job.n_pairs
    while True:
        token = take_next(address)
        if token >= job.n_tokens:
            break
        cos, sin = job.cos + 4 * token * n_pairs, job.sin + 4 * token * n_pairs
        for head in range(job.n_heads):
            x = job.x + 4 * (token * job.n_heads + head) * job.head_dim
            if job.weight and not job.norm_last:
                norm_head(job, head, x)
            turn_row(x, n_pairs, job.neighbours, cos, sin)
            if job.weight and job.norm_last:
                norm_head(job, head, x)
