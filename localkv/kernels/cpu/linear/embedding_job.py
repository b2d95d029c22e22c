"""The job of the worker that decodes a row of the embedding."""

from __future__ import annotations

from typing import NamedTuple


class EmbeddingJob(NamedTuple):
    """A row of a matrix with panels, as float32 times a factor.

    Attributes:
        next_piece: unused, as there is one piece.
        n_in: values of the row.
        row_bytes, block_bytes, record_blocks, record_bytes, n_planes, table: as in `FillJob`.
        record_values: of a row in a record.
        row: the row, in the file.
        record: memory for a record of a panel.
        values: memory for its first row, float32 [record_values].
        scale: one float32, the factor.
        out: float32 [n_in].
    """

    next_piece: int
    n_in: int
    row_bytes: int
    block_bytes: int
    record_blocks: int
    record_bytes: int
    record_values: int
    n_planes: int
    table: int
    row: int
    record: int
    values: int
    scale: int
    out: int


class RecordJob(NamedTuple):
    """What `lay_panel` reads of a job, for a record alone: `row_bytes` are those of a row in it."""

    row_bytes: int
    block_bytes: int
    record_blocks: int
    record_bytes: int
    n_planes: int
    table: int
