"""Memories that take in a token after the other: the gated delta rule, and Mamba-2.

Both keep a matrix M for each head, and differ in what a token adds to it. A column of M depends on
no other. So a piece is a few columns of a head of a sequence, which stay in the first cache while
all tokens of a prompt pass. They lie together, piece after piece, [rows, 16 * VECTORS]. Formulas as
in `kernels/recurrent.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.recurrent.jobs import ScanJob
from localkv.simd.arithmetic import f32x16, mul, sub, zero_f32
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, get_i32, get_i64, load_f32, reader, store_f32, take_next
from localkv.simd.vector import fma_grid, load_tuple, mul_add_all, store_tuple, zeros_f32

read_scan_job = reader(ScanJob)

PREDICTS = parameter("PREDICTS", True)
BY_CHANNEL = parameter("BY_CHANNEL", False)
VECTORS = parameter("VECTORS", 4)
PART = 64 * VECTORS
"""Bytes of a row of a piece."""
LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)


@njit
def softplus(x: Any) -> Any:
    """log(1 + exp(x)); what 1 + exp(x) is rounded to is allowed for (Kahan)."""
    if x > np.float32(20):
        return x
    power = np.exp2(x * LOG2_E)
    more = np.float32(1) + power
    if more == np.float32(1):
        return power
    return np.log2(more) * LN_2 * (power / (more - np.float32(1)))


@njit
def predicted(memory: Address, key: Address, n_rows: int) -> Any:
    """M^T k for some columns: vectors of M^T times k."""
    total = zeros_f32(VECTORS)
    for i in range(n_rows):
        rows = load_tuple(memory + i * PART, 0, 16, VECTORS)
        total = fma_grid(total, rows, key, i, 0, 0)
    return total


@njit
def faded(memory: Address, later: Address, decays: Address, key: Address, n_rows: int) -> Any:
    """M^T k for some columns, after each row of M has faded by its own decay, to another place."""
    total, zero = zeros_f32(VECTORS), zero_f32()
    for i in range(n_rows):
        rows = load_tuple(memory + i * PART, 0, 16, VECTORS)
        rows = mul_add_all(rows, f32x16(get_f32(decays, i)), zero)
        store_tuple(later + i * PART, 0, 16, rows)
        total = fma_grid(total, rows, key, i, 0, 0)
    return total


@cfunc("void(int64, int64)", error_model="numpy")
def scan(address: Address, thread: Count) -> None:
    """See `ScanJob`."""
    job = read_scan_job(address)
    n_parts = job.n_columns // (16 * VECTORS)
    width = 4 * job.n_columns
    n_pieces = n_parts * job.n_heads
    while True:
        piece = take_next(address)
        if piece >= n_pieces * job.n_sequences:
            break
        sequence, piece = piece // n_pieces, piece % n_pieces
        head, at = piece // n_parts, PART * (piece % n_parts)
        key_head = head // job.times if job.times else head % job.n_keys
        states = job.states + job.state_at + piece * job.n_rows * PART
        memory = states + get_i64(job.slots, sequence) * job.slot_stride
        dt, a = np.float32(0), np.float32(0)
        if not BY_CHANNEL:
            dt, a = get_f32(job.dt, head), get_f32(job.a, head)
        for token in range(get_i32(job.starts, sequence), get_i32(job.starts, sequence + 1)):
            alpha = job.alpha + job.alpha_at + token * job.alpha_stride
            rate, decay = np.float32(1), np.float32(1)
            if not BY_CHANNEL:
                rate = softplus(get_f32(alpha, head) + dt)
                decay = np.exp2(a * rate * LOG2_E)
            row = job.mixed + token * job.stride
            later = states + get_i64(job.after, token) * job.slot_stride
            key = row + job.k_at + 4 * key_head * job.n_rows
            query = row + job.q_at + 4 * key_head * job.n_rows
            value = row + job.v_at + head * width + at
            out = job.out + (token * job.n_heads + head) * width + at
            if PREDICTS:
                beta = get_f32(job.beta, token * job.n_heads + head)
                share = f32x16(np.float32(1) / (np.float32(1) + np.exp2(-beta * LOG2_E)))
                if BY_CHANNEL:
                    decays = alpha + 4 * head * job.n_rows
                    store_tuple(out, 0, 16, faded(memory, later, decays, key, job.n_rows))
                    memory = later
                else:
                    store_tuple(out, 0, 16, predicted(memory, key, job.n_rows))
                for i in range(VECTORS):
                    error = sub(load_f32(value, 16 * i), mul(f32x16(decay), load_f32(out, 16 * i)))
                    store_f32(out, 16 * i, mul(share, error))
            else:
                for i in range(VECTORS):
                    store_f32(out, 16 * i, mul(f32x16(rate), load_f32(value, 16 * i)))
            added = load_tuple(out, 0, 16, VECTORS)
            kept, zero = f32x16(decay), zero_f32()
            total = zeros_f32(VECTORS)
            for i in range(job.n_rows):
                rows = mul_add_all(load_tuple(memory + i * PART, 0, 16, VECTORS), kept, zero)
                rows = fma_grid(rows, added, key, i, 0, 0)
                store_tuple(later + i * PART, 0, 16, rows)
                total = fma_grid(total, rows, query, i, 0, 0)
            memory = later
            store_tuple(out, 0, 16, total)
