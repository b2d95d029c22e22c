"""The worker that rotates rows, such as queries and the outputs of attention."""

from __future__ import annotations

from typing import Any

from numba import cfunc

from localkv.kernels.cpu.store.rotation import rotate_block
from localkv.simd.memory import get_i64, take_next

PART = 64
"""Blocks of a piece of work."""


@cfunc("void(int64, int64)", error_model="numpy")
def worker(job: Any, thread: Any) -> None:
    """Items of the job: the counter, blocks, values of a block, x, out."""
    n_blocks, block = get_i64(job, 1), get_i64(job, 2)
    while True:
        first = take_next(job) * PART
        if first >= n_blocks:
            break
        for i in range(first, min(first + PART, n_blocks)):
            offset = 4 * i * block
            rotate_block(get_i64(job, 3) + offset, get_i64(job, 4) + offset, block)
