"""The CPU's work after products that some layers have: norms before the residual is added, gates,
decays by channel.

A row's result does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.linear.jobs import (
    ActivationJob,
    DecayJob,
    HeadGateJob,
    ResidualJob,
    SplitJob,
)
from localkv.kernels.cpu.linear.row_norm import norm_row
from localkv.simd.arithmetic import (
    add,
    div,
    exp,
    f32x16,
    fma,
    if_positive,
    log1p,
    maximum,
    mul,
    sub,
    zero_f32,
)
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, load_f32, put_f32, reader, store_f32, take_next

read_activation_job = reader(ActivationJob)
read_decay_job = reader(DecayJob)
read_head_gate_job = reader(HeadGateJob)
read_residual_job = reader(ResidualJob)
read_split_job = reader(SplitJob)


@cfunc("void(int64, int64)", error_model="numpy")
def residual(address: Address, thread: Count) -> None:
    """out = residual + scale * norm(x) (`ResidualJob`)."""
    job = read_residual_job(address)
    scale = get_f32(job.scale, 0)
    scales = f32x16(scale)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        offset = 4 * row * job.n
        x, before, out = job.x + offset, job.residual + offset, job.out + offset
        if job.weight:
            norm_row(x, job.n, job.weight, get_f32(job.eps, 0), x)
        for i in range(job.n // 16):
            y = fma(load_f32(x, 16 * i), scales, load_f32(before, 16 * i))
            store_f32(out, 16 * i, y)
        for i in range(job.n // 16 * 16, job.n):
            put_f32(out, i, get_f32(before, i) + scale * get_f32(x, i))


@cfunc("void(int64, int64)", error_model="numpy")
def split(address: Address, thread: Count) -> None:
    """q and its gate of each head (`SplitJob`)."""
    job = read_split_job(address)
    width = 4 * job.head_dim
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        for head in range(row * job.n_heads, (row + 1) * job.n_heads):
            both = job.both + 2 * head * width
            for i in range(0, job.head_dim, 16):
                store_f32(job.q + head * width, i, load_f32(both, i))
                store_f32(job.gate + head * width, i, load_f32(both + width, i))


@njit
def sigmoid(x: Any) -> Any:
    one, lowest = f32x16(np.float32(1)), f32x16(np.float32(-88))  # exp(88) is finite
    return div(one, add(one, exp(sub(zero_f32(), maximum(x, lowest)))))


@njit
def softplus(x: Any) -> Any:
    """log(1 + exp(x)), which is x above 20, as in llama.cpp."""
    most = f32x16(np.float32(20))
    lesser = sub(most, maximum(sub(most, x), zero_f32()))
    return if_positive(sub(x, most), x, log1p(exp(lesser)))


@cfunc("void(int64, int64)", error_model="numpy")
def sigmoid_gate(address: Address, thread: Count) -> None:
    """x = sigmoid(x) * up (`ActivationJob`)."""
    job = read_activation_job(address)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        x, up = job.x + 4 * row * job.n, job.up + 4 * row * job.n
        for i in range(0, job.n, 16):
            store_f32(x, i, mul(sigmoid(load_f32(x, i)), load_f32(up, i)))


@cfunc("void(int64, int64)", error_model="numpy")
def softplus_gate(address: Address, thread: Count) -> None:
    """x = softplus(x) * up (`ActivationJob`)."""
    job = read_activation_job(address)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        x, up = job.x + 4 * row * job.n, job.up + 4 * row * job.n
        for i in range(0, job.n, 16):
            store_f32(x, i, mul(softplus(load_f32(x, i)), load_f32(up, i)))


@cfunc("void(int64, int64)", error_model="numpy")
def head_gates(address: Address, thread: Count) -> None:
    """x = x times the gate of its head (`HeadGateJob`)."""
    job = read_head_gate_job(address)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        for index in range(row * job.n_heads, (row + 1) * job.n_heads):
            gate = f32x16(get_f32(job.gate, index))
            factor = softplus(gate) if job.is_softplus else sigmoid(gate)
            x = job.x + 4 * index * job.head_dim
            for i in range(0, job.head_dim, 16):
                store_f32(x, i, mul(load_f32(x, i), factor))


@cfunc("void(int64, int64)", error_model="numpy")
def decays(address: Address, thread: Count) -> None:
    """See `DecayJob`."""
    job = read_decay_job(address)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        for head in range(job.n_heads):
            a = f32x16(get_f32(job.a, head))
            at, x = 4 * head * job.n, job.x + 4 * (row * job.n_heads + head) * job.n
            for i in range(0, job.n, 16):
                v = add(load_f32(x, i), load_f32(job.dt + at, i))
                if job.least:
                    log = mul(f32x16(get_f32(job.least, 0)), sigmoid(mul(a, v)))
                else:
                    log = mul(a, softplus(v))
                store_f32(x, i, exp(log))
