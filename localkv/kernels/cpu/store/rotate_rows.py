"""The worker that rotates rows, such as queries and the outputs of attention."""

from __future__ import annotations

from numba import cfunc

from localkv.kernels.cpu.store.jobs import RotateJob
from localkv.kernels.cpu.store.pages import rotate_block
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import reader, take_next

read_rotate_job = reader(RotateJob)

PART = 64
"""Blocks of a piece of work."""


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    """Rotate blocks (`RotateJob`)."""
    job = read_rotate_job(address)
    while True:
        first = take_next(address) * PART
        if first >= job.n_blocks:
            break
        for i in range(first, min(first + PART, job.n_blocks)):
            offset = 4 * i * job.block
            rotate_block(job.x + offset, job.out + offset, job.block)
