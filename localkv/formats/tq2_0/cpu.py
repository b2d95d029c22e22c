"""tq2_0 on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import QS, D, planes

LAYOUT = planes("tq2_0", QS, D)
