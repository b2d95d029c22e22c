"""Tables that the CPU's attention workers read: arrays of int64, by address."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Table:
    """An array of int64 and its address, which NumPy takes a microsecond to tell."""

    def __init__(self, items: Int64s) -> None:
        self.items = np.ascontiguousarray(items)
        self.address = int(self.items.ctypes.data)

    def __len__(self) -> int:
        return len(self.items)


def table_of(rows: Seq[Seq[int]], n_columns: int) -> Table:
    return Table(np.array(rows, dtype=np.int64).reshape(-1, n_columns))
