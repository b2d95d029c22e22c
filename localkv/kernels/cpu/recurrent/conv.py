"""Depthwise convolutions over the last tokens of a sequence, compiled for each kernel's length.

A piece is a block of channels of a sequence. It reads the rows before the batch in the sequence's
state, and leaves the rows after it where they are to go. Formulas as in `kernels/recurrent.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.recurrent.jobs import ConvJob, GatedConvJob
from localkv.simd.activations import silu
from localkv.simd.arithmetic import add, f32x16, fma, mul, sum_lanes, zero_f32
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, get_i32, get_i64, load_f32, reader, store_f32, take_next

read_conv_job = reader(ConvJob)
read_gated_conv_job = reader(GatedConvJob)

KERNEL = parameter("KERNEL", 4)
ROWS = KERNEL - 1


@njit
def unit(x: Address, n: int, eps: Any, scale: Any) -> None:
    """Make the length of n floats the scale."""
    total = zero_f32()
    for i in range(0, n, 16):
        total = fma(load_f32(x, i), load_f32(x, i), total)
    factor = f32x16(scale / np.sqrt(sum_lanes(total) + eps))
    for i in range(0, n, 16):
        store_f32(x, i, mul(load_f32(x, i), factor))


@njit
def product(x: Address, width: int, i: int) -> Any:
    """16 values of b * y in a row [b; c; y]."""
    return mul(load_f32(x, i), load_f32(x + 2 * width, i))


@njit
def keep_states(
    job: Any, sequence: int, state: Address, x: Address, stride: int, width: int
) -> None:
    """Keep the state of a block of channels after each token whose state has a place.

    A state is the last rows of the state before the batch and of x. Rows of x are [b; c; y] of
    `width` bytes each, or convolved themselves if it is 0.
    """
    first, end = get_i32(job.starts, sequence), get_i32(job.starts, sequence + 1)
    slot, row = get_i64(job.slots, sequence), 4 * job.n_channels
    for t in range(end - first):
        after = get_i64(job.after, first + t)
        if t < end - first - 1 and after == slot:
            continue
        later = state + (after - slot) * job.slot_stride
        for j in range(ROWS):
            before = t + 1 - ROWS + j
            for i in range(0, job.block, 16):
                if before < 0:
                    v = load_f32(state + (ROWS + before) * row, i)
                elif width:
                    v = product(x + before * stride, width, i)
                else:
                    v = load_f32(x + before * stride, i)
                store_f32(later + j * row, i, v)


@cfunc("void(int64, int64)", error_model="numpy")
def conv(address: Address, thread: Count) -> None:
    """silu of a convolution, and unit lengths (`ConvJob`)."""
    job = read_conv_job(address)
    n_blocks = job.n_channels // job.block
    row = 4 * job.n_channels
    while True:
        piece = take_next(address)
        if piece >= n_blocks * job.n_sequences:
            break
        sequence, block = piece // n_blocks, piece % n_blocks
        first, end = get_i32(job.starts, sequence), get_i32(job.starts, sequence + 1)
        at = 4 * block * job.block
        slot = get_i64(job.slots, sequence)
        state = job.states + slot * job.slot_stride + job.state_at + at
        x = job.x + job.x_at + first * job.stride + at
        n = end - first
        for t in range(n):
            out = job.out + (first + t) * row + at
            for i in range(0, job.block, 16):
                total = zero_f32()
                for j in range(KERNEL):
                    before = t - ROWS + j
                    if before < 0:
                        v = load_f32(state + (ROWS + before) * row, i)
                    else:
                        v = load_f32(x + before * job.stride, i)
                    total = fma(v, load_f32(job.weight + j * row + at, i), total)
                if job.bias:
                    total = add(total, load_f32(job.bias + at, i))
                store_f32(out, i, silu(total))
            if block < job.n_unit:
                scale = get_f32(job.numbers, 1) if block < job.n_scaled else np.float32(1)
                unit(out, job.block, get_f32(job.numbers, 0), scale)
        keep_states(job, sequence, state, x, job.stride, 0)


@cfunc("void(int64, int64)", error_model="numpy")
def gated_conv(address: Address, thread: Count) -> None:
    """c * conv(b * y) (`GatedConvJob`)."""
    job = read_gated_conv_job(address)
    n_blocks = job.n_channels // job.block
    row = 4 * job.n_channels
    while True:
        piece = take_next(address)
        if piece >= n_blocks * job.n_sequences:
            break
        sequence, block = piece // n_blocks, piece % n_blocks
        first, end = get_i32(job.starts, sequence), get_i32(job.starts, sequence + 1)
        at = 4 * block * job.block
        slot = get_i64(job.slots, sequence)
        state = job.states + slot * job.slot_stride + job.state_at + at
        x = job.x + first * 3 * row + at
        n = end - first
        for t in range(n):
            out = job.out + (first + t) * row + at
            for i in range(0, job.block, 16):
                total = zero_f32()
                for j in range(KERNEL):
                    before = t - ROWS + j
                    if before < 0:
                        v = load_f32(state + (ROWS + before) * row, i)
                    else:
                        v = product(x + before * 3 * row, row, i)
                    total = fma(v, load_f32(job.weight + j * row + at, i), total)
                store_f32(out, i, mul(load_f32(x + t * 3 * row + row, i), total))
        keep_states(job, sequence, state, x, 3 * row, row)
