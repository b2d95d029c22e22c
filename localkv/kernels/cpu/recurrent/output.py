"""What recurrent layers do with a memory's output: a norm and a gate.

A token's result does not depend on other tokens.
"""

from __future__ import annotations

from numba import cfunc

from localkv.kernels.cpu.linear.row_norm import norm_row
from localkv.kernels.cpu.recurrent.jobs import OutputJob
from localkv.simd.activations import sigmoid, silu
from localkv.simd.arithmetic import fma, mul
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, load_f32, reader, store_f32, take_next

read_output_job = reader(OutputJob)


@cfunc("void(int64, int64)", error_model="numpy")
def normed_then_gated(address: Address, thread: Count) -> None:
    """x = norm(x) * silu(z), or the sigmoid of z, each group for itself (`OutputJob`)."""
    job = read_output_job(address)
    while True:
        row = take_next(address)
        if row >= job.n_tokens:
            break
        for group in range(job.n_groups):
            x = job.x + 4 * (row * job.n_groups + group) * job.n
            z = job.z + row * job.z_stride + 4 * group * job.n
            norm_row(x, job.n, job.weight + group * job.weight_stride, get_f32(job.eps, 0), x)
            for i in range(0, job.n, 16):
                v = load_f32(z, i)
                store_f32(x, i, mul(load_f32(x, i), sigmoid(v) if job.is_sigmoid else silu(v)))


@cfunc("void(int64, int64)", error_model="numpy")
def gated_then_normed(address: Address, thread: Count) -> None:
    """x = norm((x + d * skipped) * silu(z)), the norm of each group for itself (`OutputJob`)."""
    job = read_output_job(address)
    while True:
        row = take_next(address)
        if row >= job.n_tokens:
            break
        for group in range(job.n_groups):
            at = 4 * group * job.n
            x = job.x + 4 * row * job.n_groups * job.n + at
            z = job.z + row * job.z_stride + at
            skipped = job.skipped + row * job.skipped_stride + at
            for i in range(0, job.n, 16):
                y = fma(load_f32(job.d + at, i), load_f32(skipped, i), load_f32(x, i))
                store_f32(x, i, mul(y, silu(load_f32(z, i))))
            if job.weight:
                norm_row(x, job.n, job.weight + group * job.weight_stride, get_f32(job.eps, 0), x)
