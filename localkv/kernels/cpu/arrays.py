"""Arrays of NumPy: `Arrays` of the cache, and where they are in memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Arrays, Readback, Recorder, Segment, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS
from localkv.kernels.cpu.recurrent.jobs import vectors_of
from localkv.kernels.namespace import Arrived, Unrecorded
from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.shared.cpu.page_order import ItemOrder, pages_of_rows, rows_of_pages
from localkv.simd import LANES
from localkv.system.threads import use_threads_now

Floats = NDArray[np.float32]

LINE = 64
"""Bytes of a cache line: a vector that crosses two is loaded in twice the time."""


def address(x: NDArray[Any]) -> int:
    """Where the first item of an array is in memory."""
    try:  # a sixth of the time that `x.ctypes` takes
        return ctypes.addressof(ctypes.c_char.from_buffer(x.data))
    except (TypeError, ValueError):  # read-only, not contiguous or empty
        return int(x.ctypes.data)


def all_bytes(plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """All that lies between the first byte of a plane's pages [pages, ...] and the last: uint8 [n].
    Pages may be apart, or overlap where only some of them are in use."""
    n_pages = len(plane)
    n_bytes = (n_pages - 1) * plane.strides[0] + plane[0].nbytes if n_pages else 0
    return np.lib.stride_tricks.as_strided(plane, (n_bytes,), (1,))


def whole_vectors(x: Floats) -> Floats:
    """x [..., n] with zeros after each row, up to a multiple of the lanes of a vector."""
    missing = -x.shape[-1] % LANES
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


class NumpyArrays:
    """See `cache/arrays.py`."""

    def bytes(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        n_bytes = math.prod(shape)
        memory = np.empty(n_bytes + LINE - 1, np.uint8)
        first = -address(memory) % LINE
        return memory[first : first + n_bytes].reshape(shape)

    def strided(
        self, array: NDArray[np.uint8], first: int, shape: tuple[int, ...], page: int
    ) -> NDArray[np.uint8]:
        strides = (page, *(math.prod(shape[i:]) for i in range(2, len(shape) + 1)))
        flat = array.reshape(-1)[first:]
        return np.lib.stride_tricks.as_strided(flat, shape, strides)

    def zeros(self, n_rows: int, n: int) -> Floats:
        out: Floats = self.bytes((n_rows, 4 * n)).view(np.float32)
        out[:] = 0
        return out

    def floats(self, values: Sequence[float]) -> Floats:
        return np.array(values, np.float32)

    def int64(self, values: Sequence[int] | Sequence[Sequence[int]]) -> NDArray[np.int64]:
        return np.array(values, np.int64)

    def int32(self, values: Sequence[int]) -> NDArray[np.int32]:
        return np.array(values, np.int32)

    def from_numpy(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def to_numpy(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def arrived(self, array: Any, source: Arrays) -> NDArray[Any]:
        return np.ascontiguousarray(source.to_numpy(array))

    def rows_of_pages(
        self, fmt: QuantFormat, side: str, plane: int, pages: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        return rows_of_pages(_order(fmt, side, plane), pages)

    def pages_of_rows(
        self, fmt: QuantFormat, side: str, plane: int, rows: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        return pages_of_rows(_order(fmt, side, plane), rows)

    def repack_page(self, source: Segment, target: Segment, page: int) -> None:
        # not with this file, which is loaded where nothing is stored
        from localkv.kernels.cpu.store.store_kv import repack_page_cpu

        repack_page_cpu(self, source, target, page)

    def memory_piece(self, n_columns: int) -> int:
        return n_columns if n_columns % LANES else LANES * vectors_of(n_columns)

    def floating(self, array: NDArray[Any]) -> Floats:
        return array.astype(np.float32, copy=False)

    def host_floats(self, n_rows: int, n: int) -> Floats:
        return np.empty((n_rows, n), np.float32)

    def write(self, array: NDArray[Any], values: Sequence[int]) -> None:
        array[: len(values)] = values

    def place_row(self, batch: SegmentBatch, position: NDArray[np.int64]) -> None:
        first = batch.first_position if batch.first_table is None else batch.first_table
        row = position - first
        batch.length_table[:] = row + 1
        batch.slots[:] = _slots(batch, row)

    def place_group(
        self, batch: SegmentBatch, tail: SegmentBatch, position: NDArray[np.int64]
    ) -> None:
        assert batch.tail is not None
        assert batch.groups is not None
        size = batch.tail.group
        n_rows = position - batch.first_position + 1
        batch.length_table[:] = n_rows // size * size
        first = position - size + 1
        for i, rows in enumerate((batch, tail)):
            row = np.maximum(first, batch.first_position) - rows.first_position
            batch.groups[:, i] = np.where(n_rows % size == 0, _slots(rows, row), -1)

    def recorder(self) -> Recorder:
        return Unrecorded()

    def read_back(self, number: NDArray[np.int64]) -> Readback:
        return Arrived(number.copy())

    def inference(self) -> AbstractContextManager[Any]:
        return np.errstate(all="ignore")

    def use_threads(self, n: int) -> None:
        use_threads_now(n)


def _slots(batch: SegmentBatch, row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the row of each sequence is: int64 [n_sequences]."""
    pages: NDArray[np.int64] = batch.page_table[np.arange(len(row)), row // PAGE_TOKENS]
    return pages * PAGE_TOKENS + row % PAGE_TOKENS


def _order(fmt: QuantFormat, side: str, plane: int) -> ItemOrder:
    order: ItemOrder = getattr(fmt.cpu_layout.PLANES[plane], side)
    return order
