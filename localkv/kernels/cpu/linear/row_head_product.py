"""The worker of products of each head's rows of floats with that head's activations."""

from __future__ import annotations

from numba import cfunc

from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.linear.jobs import TILE_ROWS, HeadJob
from localkv.kernels.cpu.linear.pieces import find_piece
from localkv.kernels.cpu.linear.rows import multiply_rows
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import reader, take_next

read_head_job = reader(HeadJob)

KIND = parameter("FORMAT", "f16")


@cfunc("void(int64, int64)")
def multiply_heads(address: Address, thread: Count) -> None:
    """Multiply rows of heads with their activations, token by token (`HeadJob`)."""
    job = read_head_job(address)
    n_in, n_out = job.n_in, job.n_out
    while True:
        head, first, last = find_piece(job, take_next(address))
        if head < 0:
            break
        for token in range(job.n_tokens):
            x = job.x + head * job.x_head + token * job.x_token
            out = job.out + head * job.out_head + token * job.out_token
            row = first
            while row < last:
                w, to = job.data + head * job.matrix_bytes + row * job.item_bytes, out + 4 * row
                if row + TILE_ROWS <= last:
                    multiply_rows(
                        KIND, TILE_ROWS, 1, w, job.item_bytes, x, 0, n_in, to, n_out, 0, 0
                    )
                    row += TILE_ROWS
                else:
                    multiply_rows(KIND, 1, 1, w, job.item_bytes, x, 0, n_in, to, n_out, 0, 0)
                    row += 1
