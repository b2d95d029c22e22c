"""Pairs of token and expert in the order of experts, and the jobs of products with each group.

One thread groups and plans: there is little to do. The products themselves are those of dense
layers (`linear/product.py`, `linear/row_product.py`), which are told here where a group's rows and
its expert's matrix are.
"""

from __future__ import annotations

from numba import cfunc

from localkv.kernels.cpu.linear.jobs import (
    MATRIX_ITEMS,
    MULTIPLY_ITEMS,
    PACK_ITEMS,
    MatrixJob,
    MultiplyJob,
    PackJob,
)
from localkv.kernels.cpu.linear.pieces import put_job, read_matrix
from localkv.kernels.cpu.moe.jobs import (
    GROUP_ITEMS,
    PLAN_ITEMS,
    STEP_ITEMS,
    EachJob,
    Group,
    GroupJob,
    PlanJob,
    StackStep,
)
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import call_address, get_i64, put_i64, reader

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
