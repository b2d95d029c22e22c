"""The worker that transposes the blocks of matrices into panels (`formats/cpu/panel_layout.py`)."""

from __future__ import annotations

from numba import cfunc

from localkv.formats.cpu.panel_layout import LANES
from localkv.kernels.cpu.linear.read_job import read_fill_job, read_plane
from localkv.kernels.cpu.linear.units import put_units
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import put_u8, take_next


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    """Fill panels of a matrix, or of a stack of them (`FillJob`).

    Rows and blocks that complete a panel become zero.
    """
    job = read_fill_job(address)
    row_blocks = job.row_bytes // job.block_bytes
    matrix_panels = (job.n_out + LANES - 1) // LANES
    n_records = job.panel_bytes // job.record_bytes
    while True:
        panel = take_next(address)
        if panel >= job.n_panels:
            break
        matrix, in_matrix = panel // matrix_panels, panel % matrix_panels
        rows = job.rows + (matrix * job.n_out + in_matrix * LANES) * job.row_bytes
        n_lanes = min(LANES, job.n_out - in_matrix * LANES)
        out = job.panels + panel * job.panel_bytes
        cleared = job.panel_bytes
        if n_lanes < LANES:
            cleared = 0
        elif row_blocks < n_records * job.record_blocks:
            cleared = (n_records - 1) * job.record_bytes
        for i in range(cleared, job.panel_bytes):
            put_u8(out, i, 0)
        for block in range(row_blocks):
            record = out + block // job.record_blocks * job.record_bytes
            in_record = block % job.record_blocks
            for index in range(job.n_planes):
                plane = read_plane(job.table, index)
                start = rows + block * job.block_bytes + plane.start
                n_bytes = plane.n_units * plane.unit_bytes
                goal = record + plane.record_start + in_record * n_bytes * LANES
                put_units(
                    start,
                    job.row_bytes,
                    n_lanes,
                    goal,
                    plane.n_units,
                    plane.unit_bytes,
                    plane.change,
                )
