"""q2_K on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import DMIN, QS, SCALES, D, planes

LAYOUT = planes("q2_K", QS, SCALES, D, DMIN)
