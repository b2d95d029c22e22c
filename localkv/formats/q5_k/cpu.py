"""q5_K on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import DMIN, QS, SCALES, D, PanelPlane, planes

LAYOUT = planes("q5_K", QS, PanelPlane("qh", 4), SCALES, D, DMIN)
