"""Panels that are made while a matrix is in use: what the worker of its products reads of them.

An array of int64, read as a named tuple; it lives as long as the matrix, and its last item grows.
"""

from __future__ import annotations

from typing import NamedTuple

from localkv.kernels.cpu.linear.job import MATRIX_ITEMS, MULTIPLY_ITEMS
from localkv.kernels.cpu.linear.panel_bytes import PART_BYTES


class LateJob(NamedTuple):
    """A matrix, or a stack of them.

    Attributes:
        multiply: the worker that multiplies its panels.
        n_out, row_bytes: rows of one matrix, bytes of a row.
        block_bytes, record_blocks, record_bytes, panel_bytes, n_planes, table: as in `FillJob`.
        rows, panels: of all matrices.
        n_laid: panels that are made, from the first on.
    """

    multiply: int
    n_out: int
    row_bytes: int
    block_bytes: int
    record_blocks: int
    record_bytes: int
    panel_bytes: int
    n_planes: int
    table: int
    rows: int
    panels: int
    n_laid: int = 0


N_LAID = LateJob._fields.index("n_laid")

assert 8 * (MULTIPLY_ITEMS + MATRIX_ITEMS) <= PART_BYTES
