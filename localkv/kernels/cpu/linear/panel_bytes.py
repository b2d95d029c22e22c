"""What the CPU's panels take in memory (`linear/panels.py`): arithmetic without torch or Numba."""

from __future__ import annotations

import math
from collections.abc import Sequence

from localkv.formats.base import QuantFormat

LANES = 16
"""Rows of a panel."""

PANEL_FORMAT_NAMES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "q4_K", "q5_K", "q6_K")
"""The formats that are multiplied in panels; all others are read as they are in the file."""

IN_PLACE_FORMAT_NAMES = ("q8_0",)
"""Those that stay in the file where there is AVX512-VNNI: panels are made to be multiplied."""

MADE_BYTES = 1 << 18
"""Of panels that a thread makes for many tokens: part of a core's cache."""


def record_values(fmt: QuantFormat) -> int:
    """Values of a row in a record: at least 64, so that it is a whole number of cache lines."""
    return max(64, fmt.block_size)


def panels_bytes(fmt: QuantFormat, shape: Sequence[int]) -> int:
    """Bytes of a matrix [n_out, n_in], or a stack of them, in panels."""
    *stack, n_out, n_in = shape
    n_rows = -(-n_out // LANES) * LANES
    n_values = -(-n_in // record_values(fmt)) * record_values(fmt)
    return math.prod(stack) * n_rows * fmt.row_bytes(n_values)
