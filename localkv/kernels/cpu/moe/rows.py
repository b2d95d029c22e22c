"""Rows on their way to experts and back, in compiled code. A row's result depends on no other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.linear.jobs import ACTIVATION_BLOCK_BYTES
from localkv.kernels.cpu.linear.pieces import tile_size, tile_start
from localkv.kernels.cpu.moe.jobs import (
    COMBINED,
    PACK_BYTES,
    CombineJob,
    CopyJob,
    GatherJob,
    Group,
    HalveJob,
    PackTokensJob,
)
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK
from localkv.simd.arithmetic import add, div, exp, f32x16, fma, mul, sum_lanes, zero_f32
from localkv.simd.functions import rounded_to_half
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import (
    call_address,
    get_f32,
    get_i32,
    get_i64,
    load_f32,
    put_i32,
    put_i64,
    reader,
    store_f32,
    take_next,
)

read_group = reader(Group)
read_combine_job = reader(CombineJob)
read_copy_job = reader(CopyJob)
read_gather_job = reader(GatherJob)
read_halve_job = reader(HalveJob)
read_pack_tokens_job = reader(PackTokensJob)

WORDS = ACTIVATION_BLOCK_BYTES // 4
"""Of a packed block of one token."""
CODE_WORDS = BLOCK // 4
ONE = np.float32(1)
MOST_POWER = np.float32(88)
"""Its exponential is finite."""


@cfunc("void(int64, int64)")
def pack_tokens(address: Address, thread: Count) -> None:
    """Pack each token as if it were alone (`PackTokensJob`)."""
    job = read_pack_tokens_job(address)
    pack = job.jobs + thread * PACK_BYTES
    while True:
        token = take_next(address)
        if token >= job.n_tokens:
            break
        put_i64(pack, 0, 0)
        put_i64(pack, 1, 1)
        put_i64(pack, 2, job.n_in)
        put_i64(pack, 3, job.n_blocks)
        put_i64(pack, 4, job.n_parts)
        put_i64(pack, 5, job.x + token * job.x_bytes)
        put_i64(pack, 6, job.packed + token * job.token_bytes)
        call_address(job.worker, (pack, thread))


@cfunc("void(int64, int64)")
def gather(address: Address, thread: Count) -> None:
    """Put words of packed tokens side by side, tile by tile of each group (`GatherJob`).

    Of a token in a tile of T, word i of a block is word i T + t; alone, it is word i, or, where
    that token is in planes, one of all codes or of all facts of a kind. Tokens that lie side by
    side are copied.
    """
    job = read_gather_job(address)
    n_blocks = job.n_blocks
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        _, first, n = read_group(job.groups + 8, get_i64(job.group_of, row))
        if n == 1:
            continue
        token = get_i64(job.pairs, row) // job.n_used
        words = job.singles + token * job.token_bytes
        if job.side_by_side:
            for i in range(job.token_bytes // 4):
                put_i32(job.grouped + row * job.token_bytes, i, get_i32(words, i))
            continue
        start = tile_start(row - first, n)
        size = tile_size(start, n)
        to = job.grouped + (first + start) * job.token_bytes + 4 * (row - first - start)
        if not job.in_planes:
            for i in range(n_blocks * WORDS):
                put_i32(to, i * size, get_i32(words, i))
            continue
        facts = words + n_blocks * BLOCK
        for block in range(n_blocks):
            goal = to + 4 * block * WORDS * size
            for i in range(CODE_WORDS):
                put_i32(goal, i * size, get_i32(words, block * CODE_WORDS + i))
            for i in range(WORDS - CODE_WORDS):
                put_i32(goal, (CODE_WORDS + i) * size, get_i32(facts, i * n_blocks + block))


@cfunc("void(int64, int64)")
def copy(address: Address, thread: Count) -> None:
    """Copy each token's row to those of its experts, times a weight (`CopyJob`)."""
    job = read_copy_job(address)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        pair = get_i64(job.pairs, row)
        factor = f32x16(ONE)
        if job.weights != 0:
            factor = f32x16(get_f32(job.weights, pair))
        x, out = job.x + 4 * (pair // job.n_used) * job.n, job.out + 4 * row * job.n
        for i in range(0, job.n, 16):
            store_f32(out, i, mul(load_f32(x, i), factor))


@cfunc("void(int64, int64)")
def halve(address: Address, thread: Count) -> None:
    """Round floats to halves (`HalveJob`)."""
    job = read_halve_job(address)
    while True:
        start = take_next(address) * COMBINED
        if start >= job.n:
            break
        for i in range(start, min(start + COMBINED, job.n), 16):
            store_f32(job.out, i, rounded_to_half(load_f32(job.x, i)))


@njit
def shared_factor(job: Any, token: int) -> Any:
    """What the shared expert's output is multiplied with."""
    factor = get_f32(job.shared_scale, 0)
    if job.shared_gate == 0:
        return f32x16(factor)
    h, total = job.h + 4 * token * job.n, zero_f32()
    for i in range(0, job.n, 16):
        total = fma(load_f32(h, i), load_f32(job.shared_gate, i), total)
    gate = sum_lanes(total)
    if gate != gate:
        return f32x16(gate)
    power = exp(f32x16(min(-gate, MOST_POWER)))
    return div(f32x16(factor), add(f32x16(ONE), power))


@cfunc("void(int64, int64)", error_model="numpy")
def combine(address: Address, thread: Count) -> None:
    """Add up what a token's experts give, in the order of their numbers (`CombineJob`)."""
    job = read_combine_job(address)
    n, n_used = job.n, job.n_used
    n_parts = (n + COMBINED - 1) // COMBINED
    while True:
        piece = take_next(address)
        if piece >= job.n_tokens * n_parts:
            break
        token, start = piece // n_parts, piece % n_parts * COMBINED
        end = min(start + COMBINED, n)
        out = job.out + 4 * token * n
        for i in range(start, end, 16):
            store_f32(out, i, zero_f32())
        for pair in range(token * n_used, (token + 1) * n_used):
            expert, y = get_i64(job.experts, pair), job.y + 4 * n * get_i64(job.rows, pair)
            scale, factor = f32x16(ONE), f32x16(ONE)
            if job.down_scale != 0:
                scale = f32x16(get_f32(job.down_scale, expert))
            if job.weights != 0:
                factor = f32x16(get_f32(job.weights, pair))
            for i in range(start, end, 16):
                value = mul(load_f32(y, i), scale)
                if job.down_bias != 0:
                    value = add(value, load_f32(job.down_bias + 4 * n * expert, i))
                store_f32(out, i, fma(value, factor, load_f32(out, i)))
        if job.shared != 0:
            factor, y = shared_factor(job, token), job.shared + 4 * token * n
            for i in range(start, end, 16):
                store_f32(out, i, fma(load_f32(y, i), factor, load_f32(out, i)))
        if job.residual != 0:
            before = job.residual + 4 * token * n
            for i in range(start, end, 16):
                store_f32(out, i, add(load_f32(before, i), load_f32(out, i)))
