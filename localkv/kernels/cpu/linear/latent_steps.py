"""The CPU's work between products of latent attention. Rows of float32, at addresses.

A row's result does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit

from localkv.kernels.cpu.linear.jobs import LatentQueriesJob, LatentRowsJob
from localkv.kernels.cpu.linear.row_norm import norm_row, turn_row
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, put_f32, reader, take_next

read_rows_job, read_queries_job = reader(LatentRowsJob), reader(LatentQueriesJob)


@njit
def put_turned(job: Any, row: Count, x: Address, out: Address) -> None:
    """A rotated part, copied and turned as row `row` is."""
    for i in range(job.rope_dim):
        put_f32(out, i, get_f32(x, i))
    if job.n_pairs:
        at = 4 * row * job.n_pairs
        turn_row(out, job.n_pairs, job.neighbours, job.cos + at, job.sin + at)


@cfunc("void(int64, int64)", error_model="numpy")
def latent_rows(address: Address, thread: Count) -> None:
    """Latents, normed, and rotated parts (`LatentRowsJob`)."""
    job = read_rows_job(address)
    eps = get_f32(job.eps, 0)
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        x = job.x + 4 * row * (job.latent_dim + job.rope_dim)
        latent = job.latent + 4 * row * job.latent_dim
        norm_row(x, job.latent_dim, job.weight, eps, latent)
        put_turned(job, row, x + 4 * job.latent_dim, job.rotated + 4 * row * job.rope_dim)


@cfunc("void(int64, int64)", error_model="numpy")
def latent_queries(address: Address, thread: Count) -> None:
    """Heads of q and their rotated parts (`LatentQueriesJob`)."""
    job = read_queries_job(address)
    width = job.nope_dim + job.rope_dim
    while True:
        row = take_next(address)
        if row >= job.n_rows:
            break
        for head in range(row * job.n_heads, (row + 1) * job.n_heads):
            x = job.x + 4 * head * width
            if job.scale:
                scale = get_f32(job.scale, row)
                for i in range(width):
                    put_f32(x, i, get_f32(x, i) * scale)
            put_turned(job, row, x + 4 * job.nope_dim, job.rotated + 4 * head * job.rope_dim)
