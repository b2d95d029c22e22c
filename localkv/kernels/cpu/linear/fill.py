"""The worker that transposes the blocks of matrices into panels (`formats/cpu/panel_layout.py`)."""

from __future__ import annotations

from typing import Any

from numba import cfunc

from localkv.formats.cpu.panel_layout import LANES
from localkv.kernels.cpu.linear.units import put_units
from localkv.simd.memory import get_i64, put_u8, take_next


@cfunc("void(int64, int64)", error_model="numpy")
def worker(job: Any, thread: Any) -> None:
    """Fill panels of a matrix, or of a stack of them.

    Items of the job: the counter of panels, panels of all matrices, rows of one, bytes of a row,
    bytes of a block, blocks and bytes of a record, bytes of a panel, planes, and the addresses of
    `PanelLayout.table`, the rows and the panels. Rows and blocks that complete a panel become zero.
    """
    n_panels, n_out, row_bytes = get_i64(job, 1), get_i64(job, 2), get_i64(job, 3)
    block_bytes, record_blocks = get_i64(job, 4), get_i64(job, 5)
    record_bytes, panel_bytes = get_i64(job, 6), get_i64(job, 7)
    n_planes, table = get_i64(job, 8), get_i64(job, 9)
    row_blocks = row_bytes // block_bytes
    matrix_panels = (n_out + LANES - 1) // LANES
    n_records = panel_bytes // record_bytes
    while True:
        panel = take_next(job)
        if panel >= n_panels:
            break
        matrix, in_matrix = panel // matrix_panels, panel % matrix_panels
        rows = get_i64(job, 10) + (matrix * n_out + in_matrix * LANES) * row_bytes
        n_lanes = min(LANES, n_out - in_matrix * LANES)
        out = get_i64(job, 11) + panel * panel_bytes
        cleared = panel_bytes
        if n_lanes < LANES:
            cleared = 0
        elif row_blocks < n_records * record_blocks:
            cleared = (n_records - 1) * record_bytes
        for i in range(cleared, panel_bytes):
            put_u8(out, i, 0)
        for block in range(row_blocks):
            record = out + block // record_blocks * record_bytes
            in_record = block % record_blocks
            for plane in range(n_planes):
                entry = table + 40 * plane
                start = rows + block * block_bytes + get_i64(entry, 0)
                n_units, unit, change = get_i64(entry, 1), get_i64(entry, 2), get_i64(entry, 4)
                goal = record + get_i64(entry, 3) + in_record * n_units * unit * LANES
                put_units(start, row_bytes, n_lanes, goal, n_units, unit, change)
