"""Rows of the embedding, one at a time: what each generated token begins with.

NumPy takes some twenty calls to decode a row. None of them finds anything of its own in the caches
after a token has read all weights. A kernel is done in a twentieth of that time.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localkv.kernels.backend import scaled
from localkv.kernels.bounds import check_array
from localkv.kernels.cpu.arrays import Floats, address
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.linear.jobs import LAYOUTS, EmbeddingJob
from localkv.kernels.cpu.runtime.thread_pool import worker_call
from localkv.quant_formats.packed_tensor import PackedTensor

_ROW, _OUT = (EmbeddingJob._fields.index(name) for name in ("row", "out"))


def embedding_source(name: str) -> KernelSource | None:
    """The kernel that decodes a row of a format; None for those without blocks, and whose rows
    NumPy decodes with a call or two."""
    return KernelSource("linear/embedding_row", {"FORMAT": name}) if name in LAYOUTS else None


class _Rows:
    """The rows of one matrix [n_rows, n_in], which lie in memory one after the other."""

    def __init__(self, weight: PackedTensor, scale: float, source: KernelSource) -> None:
        self.weight, self.scale = weakref.ref(weight), scale
        self.worker = specialized(source)["worker"]
        self.run = worker_call(self.worker)
        layout, rows = LAYOUTS[weight.format.name], weight.rows
        n_in = weight.shape[-1]
        row_bytes = weight.format.row_bytes(n_in)
        check_array("rows of the embedding", rows, "uint8", weight.shape[0], row_bytes)
        self.first, self.row_bytes = address(rows), row_bytes
        self.record = np.empty(layout.record_bytes, np.uint8)
        self.values = np.empty(layout.record_values, np.float32)
        self.factor = np.array([scale], np.float32)
        job = EmbeddingJob(
            next_piece=0,
            n_in=n_in,
            row_bytes=row_bytes,
            block_bytes=layout.format.block_bytes,
            record_blocks=layout.record_blocks,
            record_bytes=layout.record_bytes,
            record_values=layout.record_values,
            n_planes=len(layout.table),
            table=address(layout.table),
            row=0,
            record=address(self.record),
            values=address(self.values),
            scale=address(self.factor),
            out=0,
        )
        self.job = np.array(job, np.int64)
        self.address = address(self.job)
        self.out: Floats | None = None

    def lead_to(self, out: Floats) -> None:
        """Decode the next rows to float32 [1, n_in]."""
        if out is not self.out:
            self.out, self.job[_OUT] = out, address(out)

    def put(self, token: int, out: Floats) -> None:
        """Decode a row to float32 [1, n_in]."""
        self.lead_to(out)
        self.job[_ROW] = self.first + token * self.row_bytes
        self.run(self.address, 0)


class RowJob(NamedTuple):
    """What decodes a row of a matrix to a place: addresses, and the bytes of a row.

    Attributes:
        worker, job: of the worker.
        item: of the job's item that has the row's address.
        first: of the first row.
        row_bytes: from row to row.
    """

    worker: int
    job: int
    item: int
    first: int
    row_bytes: int


class Embedding:
    """See `Backend.embed`."""

    def __init__(self) -> None:
        self._rows: _Rows | None = None

    def forget(self) -> None:
        """Give memory back."""
        self._rows = None

    def __call__(self, ids: NDArray[np.int64], weight: PackedTensor, scale: float) -> Floats:
        first = int(ids[0])
        is_one = len(ids) == 1 and 0 <= first < weight.shape[0]
        if is_one:
            out = np.empty((1, weight.shape[1]), np.float32)
            self.put(first, weight, scale, out)
            return out
        x = weight[ids].decode()
        return scaled(x if x.flags.writeable else x.copy(), scale)  # floats may be the file's

    def put(self, token: int, weight: PackedTensor, scale: float, out: Floats) -> None:
        """The row of a token that the matrix has, to float32 [1, n_in]."""
        rows = self._rows_of(weight, scale)
        if rows is None:
            out[:] = scaled(weight[token : token + 1].decode(), scale)
        else:
            rows.put(token, out)

    def row_job(self, weight: PackedTensor, scale: float, out: Floats) -> RowJob | None:
        """What `put` runs for some matrix and place; None where NumPy does it."""
        rows = self._rows_of(weight, scale)
        if rows is None:
            return None
        rows.lead_to(out)
        at = rows.address
        return RowJob(rows.worker, at, at + 8 * _ROW, rows.first, rows.row_bytes)

    def _rows_of(self, weight: PackedTensor, scale: float) -> _Rows | None:
        rows = self._rows
        if rows is None or rows.weight() is not weight or rows.scale != scale:
            source = embedding_source(weight.format.name)
            rows = None if source is None else _Rows(weight, scale, source)
            self._rows = rows
        return rows
