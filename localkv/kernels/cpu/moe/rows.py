"""Rows on their way to experts and back, in compiled code. A row's result depends on no other.

Pairs of token and expert are put in the order of experts, and the jobs of products with each group
are made. One thread groups and plans: there is little to do. The products themselves are those that
dense layers run (`linear/product.py`, `linear/row_product.py`), which are told here where a group's
rows and its expert's matrix are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.linear.jobs import (
    ACTIVATION_BLOCK_BYTES,
    MATRIX_ITEMS,
    MULTIPLY_ITEMS,
    PACK_ITEMS,
    MatrixJob,
    MultiplyJob,
    PackJob,
)
from localkv.kernels.cpu.linear.pieces import put_job, read_matrix, tile_size, tile_start
from localkv.kernels.cpu.moe.jobs import (
    COMBINED,
    GROUP_ITEMS,
    PACK_BYTES,
    PLAN_ITEMS,
    STEP_ITEMS,
    CombineJob,
    CopyJob,
    EachJob,
    GatherJob,
    Group,
    GroupJob,
    HalveJob,
    PackTokensJob,
    PlanJob,
    StackStep,
)
from localkv.quant_formats.shared.cpu.panel_layout import BLOCK
from localkv.simd.arithmetic import (
    add,
    div,
    exp,
    f32x16,
    fma,
    mul,
    rounded_to_half,
    sum_lanes,
    zero_f32,
)
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
read_each_job = reader(EachJob)
read_group_job = reader(GroupJob)
read_plan_job = reader(PlanJob)
read_step = reader(StackStep)

read_multiply_job = reader(MultiplyJob)
read_pack_job = reader(PackJob)


@cfunc("void(int64, int64)")
def group(address: Address, thread: Count) -> None:
    """Count each expert's pairs, and give them rows in the order of tokens (`GroupJob`)."""
    job = read_group_job(address)
    for expert in range(job.n_experts):
        put_i64(job.next_rows, expert, 0)
    for pair in range(job.n_pairs):
        expert = get_i64(job.experts, pair)
        put_i64(job.next_rows, expert, get_i64(job.next_rows, expert) + 1)
    n_groups = row = 0
    for expert in range(job.n_experts):
        n = get_i64(job.next_rows, expert)
        put_i64(job.next_rows, expert, row)
        if n > 0:
            at = 1 + GROUP_ITEMS * n_groups
            put_i64(job.groups, at, expert)
            put_i64(job.groups, at + 1, row)
            put_i64(job.groups, at + 2, n)
            for i in range(row, row + n):
                put_i64(job.group_of, i, n_groups)
            n_groups += 1
        row += n
    put_i64(job.groups, 0, n_groups)
    for pair in range(job.n_pairs):
        expert = get_i64(job.experts, pair)
        row = get_i64(job.next_rows, expert)
        put_i64(job.next_rows, expert, row + 1)
        put_i64(job.rows, pair, row)
        put_i64(job.pairs, row, pair)


@cfunc("void(int64, int64)")
def plan(address: Address, thread: Count) -> None:
    """Make the jobs of packing and multiplying each group's rows (`PlanJob`)."""
    job = read_plan_job(address)
    pack = read_pack_job(address + 8 * PLAN_ITEMS)
    multiply_address = address + 8 * (PLAN_ITEMS + PACK_ITEMS)
    multiply = read_multiply_job(multiply_address)
    steps = multiply_address + 8 * (MULTIPLY_ITEMS + multiply.n_matrices * MATRIX_ITEMS)
    for index in range(get_i64(job.groups, 0)):
        expert, first, n = read_group(job.groups + 8, index)
        packed = pack.packed + first * job.row_bytes
        x = pack.x + first * job.x_bytes
        at = put_job(
            job.jobs + index * job.job_bytes,
            PackJob(0, n, pack.n_in, pack.n_blocks, pack.n_parts, x, packed),
        )
        activations = multiply.activations + first * job.row_bytes
        if job.singles != 0 and n == 1:
            token = get_i64(job.pairs, first) // job.n_used
            activations = job.singles + token * job.row_bytes
        at = put_job(
            at,
            MultiplyJob(
                0,
                n,
                multiply.n_in,
                multiply.n_records,
                multiply.token_bytes,
                activations,
                multiply.chunk,
                multiply.panel_bytes,
                multiply.group,
                multiply.panels,
                multiply.n_matrices,
            ),
        )
        for i in range(multiply.n_matrices):
            matrix = read_matrix(multiply_address, i)
            step = read_step(steps + 8 * STEP_ITEMS * i)
            addend = matrix.addend
            if addend != 0:
                addend += expert * step.addend_bytes
            at = put_job(
                at,
                MatrixJob(
                    matrix.data + expert * step.matrix_bytes,
                    matrix.item_bytes,
                    matrix.n_items,
                    matrix.n_out,
                    matrix.out + 4 * first * matrix.n_out,
                    addend,
                    0,
                    matrix.late,
                ),
            )


@cfunc("void(int64, int64)")
def each(address: Address, thread: Count) -> None:
    """Take part in every group's job, one after the other (`EachJob`)."""
    job = read_each_job(address)
    for index in range(get_i64(job.groups, 0)):
        call_address(job.worker, (job.jobs + index * job.job_bytes, thread))


read_combine_job = reader(CombineJob)
read_copy_job = reader(CopyJob)
read_gather_job = reader(GatherJob)
read_halve_job = reader(HalveJob)
read_pack_tokens_job = reader(PackTokensJob)

WORDS = ACTIVATION_BLOCK_BYTES // 4
"""Words of a packed block of one token."""
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

    Of a token in a tile of T, word i of a block is word i T + t. Of a token alone it is word i.
    Where that token is in planes, it is one of all codes or of all facts of a kind. Tokens that lie
    side by side are copied.
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
    """Copy each token's row to its experts' rows, times a weight (`CopyJob`)."""
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
