"""The worker of products with matrices whose panels are not all made yet (`LateJob`).

Panels that are missing are made on the way, a few at a time, in the thread's part of scratch
memory, and those that are there are read. Either way the worker of the format's panels multiplies
them, with a job of its own, so that bits are the same. Nothing here depends on the format.
"""

from __future__ import annotations

from typing import Any

from numba import cfunc, njit

from localkv.kernels.cpu.linear.jobs import PART_BYTES, LateJob, MatrixJob, MultiplyJob
from localkv.kernels.cpu.linear.panels import lay_panel
from localkv.kernels.cpu.linear.pieces import find_chunk, put_job, read_matrix
from localkv.quant_formats.shared.cpu.panel_layout import LANES
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import call_address, reader, take_next

read_late_job = reader(LateJob)

read_multiply_job = reader(MultiplyJob)


@njit
def put_part(
    to: Address, job: Any, matrix: Any, panels: Address, first: Count, last: Count
) -> None:
    """Write the job of panels `first` to `last` of a matrix alone, which start at `panels`.

    Panels are counted from the matrix' first, which is where rows of `out` begin.
    """
    chunk = last - first
    if first % chunk:
        chunk = 1
    at = put_job(
        to,
        MultiplyJob(
            first // chunk,
            job.n_tokens,
            job.n_in,
            job.n_records,
            job.token_bytes,
            job.activations,
            chunk,
            job.panel_bytes,
            0,
            0,
            1,
        ),
    )
    start = panels - first * job.panel_bytes
    stride = matrix.addend_stride
    put_job(
        at,
        MatrixJob(start, job.panel_bytes, last, matrix.n_out, matrix.out, matrix.addend, stride, 0),
    )


@njit
def multiply_part(thread: Count, job: Any, matrix: Any, first: Count, last: Count) -> None:
    late = read_late_job(matrix.late)
    own = job.panels + thread * (job.group * job.panel_bytes + PART_BYTES)
    part = own + job.group * job.panel_bytes
    matrix_bytes = late.n_out * late.row_bytes
    before = matrix.data - late.rows
    in_matrix = before % matrix_bytes // late.row_bytes
    number = before // matrix_bytes * ((late.n_out + LANES - 1) // LANES) + in_matrix // LANES
    if number + last <= late.n_laid:
        panels = late.panels + (number + first) * job.panel_bytes
        put_part(part, job, matrix, panels, first, last)
        call_address(late.multiply, (part, thread))
        return
    while first < last:
        end = min(first + job.group, last)
        for i in range(first, end):
            rows = matrix.data + i * LANES * late.row_bytes
            n_left = late.n_out - in_matrix - i * LANES
            out = own + (i - first) * job.panel_bytes
            lay_panel(late, rows, min(LANES, n_left), max(0, n_left - LANES), out)
        put_part(part, job, matrix, own, first, end)
        call_address(late.multiply, (part, thread))
        first = end


@cfunc("void(int64, int64)", error_model="numpy")
def multiply(address: Address, thread: Count) -> None:
    """Multiply rows of some matrices with packed activations (`MultiplyJob`)."""
    job = read_multiply_job(address)
    while True:
        index, first, last = find_chunk(address, job, take_next(address))
        if index < 0:
            break
        multiply_part(thread, job, read_matrix(address, index), first, last)
