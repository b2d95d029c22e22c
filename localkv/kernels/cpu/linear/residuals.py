"""The CPU's work after products that some layers have: norms before the residual is added, gates,
decays by channel.

A row's result does not depend on other rows.
"""

from __future__ import annotations

import numpy as np
from numba import cfunc

from localkv.kernels.cpu.linear.jobs import (
    AttentionGateJob,
    ClampJob,
    DecayJob,
    ResidualJob,
    SplitJob,
)
from localkv.kernels.cpu.linear.row_norm import norm_row
from localkv.simd.activations import sigmoid, softplus
from localkv.simd.arithmetic import add, exp, f32x16, fma, maximum, mul, sub, zero_f32
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, load_f32, put_f32, reader, store_f32, take_next

PART = 1024
"""Values of a piece of work where rows do not matter."""

read_clamp_job = reader(ClampJob)
read_decay_job = reader(DecayJob)
read_gate_job = reader(AttentionGateJob)
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


@cfunc("void(int64, int64)", error_model="numpy")
def gates(address: Address, thread: Count) -> None:
    """x = x times the activation of its gate, or its head's (`AttentionGateJob`)."""
    job = read_gate_job(address)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        for index in range(row * job.n_heads, (row + 1) * job.n_heads):
            x = job.x + 4 * index * job.head_dim
            gate = job.gate + (4 * index if job.is_by_head else 4 * index * job.head_dim)
            for i in range(0, job.head_dim, 16):
                v = f32x16(get_f32(gate, 0)) if job.is_by_head else load_f32(gate, i)
                factor = softplus(v) if job.is_softplus else sigmoid(v)
                store_f32(x, i, mul(load_f32(x, i), factor))


@cfunc("void(int64, int64)", error_model="numpy")
def clamp(address: Address, thread: Count) -> None:
    """See `ClampJob`; NaN stays."""
    job = read_clamp_job(address)
    least = np.float32(-get_f32(job.limit, 0))
    while True:
        start = take_next(address) * PART
        if start >= job.n:
            break
        end = min(start + PART, job.n)
        whole = start + (end - start) // 16 * 16
        for i in range(start, whole, 16):
            most_negated = maximum(f32x16(least), sub(zero_f32(), load_f32(job.x, i)))
            store_f32(job.x, i, maximum(f32x16(least), sub(zero_f32(), most_negated)))
        for i in range(whole, end):
            x = get_f32(job.x, i)
            if x < least:
                put_f32(job.x, i, least)
            elif x > -least:
                put_f32(job.x, i, -least)


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
