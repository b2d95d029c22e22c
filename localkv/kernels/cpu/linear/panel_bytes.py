"""Which weights the CPU multiplies how, and what panels take: facts without torch or Numba."""

from __future__ import annotations

import math
from collections.abc import Sequence

from localkv.quant_formats import WEIGHT_FORMATS, QuantFormat
from localkv.quant_formats.shared.cpu.panel_layout import LANES, record_values

_WITH_KERNEL = [fmt for fmt in WEIGHT_FORMATS.values() if fmt.has_part("cpu")]

PANEL_FORMAT_NAMES = tuple(fmt.name for fmt in _WITH_KERNEL if fmt.block_size > 1)
"""The formats that are multiplied in panels."""

ROW_FORMAT_NAMES = tuple(fmt.name for fmt in _WITH_KERNEL if fmt.block_size == 1)
"""Those whose rows are multiplied as they are in the file."""

ROUNDED_ROW_NAMES = ("bf16",)
"""Of these, those whose activations are rounded to the same format where the CPU multiplies it."""

IN_PLACE_FORMAT_NAMES = tuple(fmt.name for fmt in _WITH_KERNEL if fmt.stays_in_file)
"""Those that stay in the file where CPUs multiply bytes: panels are made to be multiplied."""

MADE_BYTES = 1 << 18
"""Of panels that a thread makes for many tokens: part of a core's cache."""

PART_BYTES = 256
"""Room for the job of a part of a step (`linear/late_job.py`), which each thread makes."""


def panels_bytes(fmt: QuantFormat, shape: Sequence[int]) -> int:
    """Bytes of a matrix [n_out, n_in], or a stack of them, in panels."""
    *stack, n_out, n_in = shape
    n_rows = -(-n_out // LANES) * LANES
    n_values = -(-n_in // record_values(fmt)) * record_values(fmt)
    return math.prod(stack) * n_rows * fmt.row_bytes(n_values)
