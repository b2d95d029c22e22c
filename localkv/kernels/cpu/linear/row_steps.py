"""The CPU's work on rows that not all models and caches have: sinks of attention, segments to be
merged, factors.

A row's result does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.linear.jobs import ActivationJob, MergeJob, SinkJob
from localkv.simd.arithmetic import add, div, exp, f32x16, maximum, mul, sub
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, load_f32, put_f32, reader, store_f32, take_next

read_activation_job = reader(ActivationJob)
read_merge_job = reader(MergeJob)
read_sink_job = reader(SinkJob)


@njit
def share(lse: Any, sink: Any) -> Any:
    """exp(lse) / (exp(lse) + exp(sink)) in all lanes."""
    most = maximum(lse, sink)
    mine, other = exp(sub(lse, most)), exp(sub(sink, most))
    return div(mine, add(mine, other))


@cfunc("void(int64, int64)", error_model="numpy")
def sinks(address: Address, thread: Count) -> None:
    """Attention's sums, shared with a sink for each head that has no value (`SinkJob`)."""
    job = read_sink_job(address)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        for head in range(job.n_heads):
            index = row * job.n_heads + head
            factor = share(f32x16(get_f32(job.lse, index)), f32x16(get_f32(job.sinks, head)))
            x = job.x + 4 * index * job.head_dim
            for i in range(0, job.head_dim, 16):
                store_f32(x, i, mul(load_f32(x, i), factor))


@cfunc("void(int64, int64)", error_model="numpy")
def merged(address: Address, thread: Count) -> None:
    """Attention's sums over several segments, weighted by exp(log-sum-exp) (`MergeJob`)."""
    job = read_merge_job(address)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        for head in range(job.n_heads):
            index = row * job.n_heads + head
            first, second = f32x16(get_f32(job.lse0, index)), f32x16(get_f32(job.lse1, index))
            most, third, fourth, fifth, sink = maximum(first, second), first, first, first, first
            if job.n_parts > 2:
                third = f32x16(get_f32(job.lse2, index))
                most = maximum(most, third)
            if job.n_parts > 3:
                fourth = f32x16(get_f32(job.lse3, index))
                most = maximum(most, fourth)
            if job.n_parts > 4:
                fifth = f32x16(get_f32(job.lse4, index))
                most = maximum(most, fifth)
            if job.sinks != 0:
                sink = f32x16(get_f32(job.sinks, head))
                most = maximum(most, sink)
            first, second = exp(sub(first, most)), exp(sub(second, most))
            total = add(first, second)
            if job.n_parts > 2:
                third = exp(sub(third, most))
                total = add(total, third)
            if job.n_parts > 3:
                fourth = exp(sub(fourth, most))
                total = add(total, fourth)
            if job.n_parts > 4:
                fifth = exp(sub(fifth, most))
                total = add(total, fifth)
            if job.sinks != 0:
                total = add(total, exp(sub(sink, most)))
            first, second, third = div(first, total), div(second, total), div(third, total)
            fourth, fifth = div(fourth, total), div(fifth, total)
            at = 4 * index * job.head_dim
            for i in range(0, job.head_dim, 16):
                x = mul(load_f32(job.x0 + at, i), first)
                x = add(x, mul(load_f32(job.x1 + at, i), second))
                if job.n_parts > 2:
                    x = add(x, mul(load_f32(job.x2 + at, i), third))
                if job.n_parts > 3:
                    x = add(x, mul(load_f32(job.x3 + at, i), fourth))
                if job.n_parts > 4:
                    x = add(x, mul(load_f32(job.x4 + at, i), fifth))
                store_f32(job.x0 + at, i, x)


@cfunc("void(int64, int64)", error_model="numpy")
def scaled(address: Address, thread: Count) -> None:
    """x = x times the first of `parameters` (`ActivationJob`, of any width)."""
    job = read_activation_job(address)
    factor = get_f32(job.parameters, 0)
    factors = f32x16(factor)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        x = job.x + 4 * row * job.n
        for i in range(job.n // 16):
            store_f32(x, 16 * i, mul(load_f32(x, 16 * i), factors))
        for i in range(job.n // 16 * 16, job.n):
            put_f32(x, i, get_f32(x, i) * np.float32(factor))
