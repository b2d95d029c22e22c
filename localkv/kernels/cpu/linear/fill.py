"""The worker that transposes the blocks of matrices into panels (`shared/cpu/panel_layout.py`)."""

from __future__ import annotations

from numba import cfunc

from localkv.kernels.cpu.linear.jobs import FillJob
from localkv.kernels.cpu.linear.panels import lay_panel
from localkv.quant_formats.shared.cpu.panel_layout import LANES
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import reader, take_next

read_fill_job = reader(FillJob)


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    """Fill panels of a matrix, or of a stack of them (`FillJob`)."""
    job = read_fill_job(address)
    matrix_panels = (job.n_out + LANES - 1) // LANES
    while True:
        panel = job.first_panel + take_next(address)
        if panel >= job.first_panel + job.n_panels:
            break
        matrix, in_matrix = panel // matrix_panels, panel % matrix_panels
        rows = job.rows + (matrix * job.n_out + in_matrix * LANES) * job.row_bytes
        n_left = job.n_out - in_matrix * LANES
        out = job.panels + panel * job.panel_bytes
        lay_panel(job, rows, min(LANES, n_left), max(0, n_left - LANES), out)
