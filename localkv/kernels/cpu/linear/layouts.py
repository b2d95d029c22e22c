"""Which weights the CPU multiplies how, and how panels lie in memory, without torch or Numba."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from localkv.quant_formats import FORMATS, WEIGHT_FORMATS, QuantFormat
from localkv.quant_formats.shared.cpu.panel_layout import LANES, PanelLayout, record_values

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
"""Room for the job of a part of a step (`linear/jobs.py`), which each thread makes."""


def panels_bytes(fmt: QuantFormat, shape: Sequence[int]) -> int:
    """Bytes of a matrix [n_out, n_in], or a stack of them, in panels."""
    *stack, n_out, n_in = shape
    n_rows = -(-n_out // LANES) * LANES
    n_values = -(-n_in // record_values(fmt)) * record_values(fmt)
    return math.prod(stack) * n_rows * fmt.row_bytes(n_values)


class _Layouts(Mapping[str, PanelLayout]):
    """Those of all formats; the files of a format are imported for who asks for it."""

    def __init__(self) -> None:
        self._known = dict[str, PanelLayout]()

    def __getitem__(self, name: str) -> PanelLayout:
        if name not in self._known:
            if name not in self:
                raise KeyError(name)
            self._known[name] = FORMATS[name].cpu_layout.LAYOUT
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in PANEL_FORMAT_NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(PANEL_FORMAT_NAMES)

    def __len__(self) -> int:
        return len(PANEL_FORMAT_NAMES)


LAYOUTS: Mapping[str, PanelLayout] = _Layouts()
