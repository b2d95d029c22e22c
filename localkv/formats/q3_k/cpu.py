"""q3_K on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import QS, SCALES, D, PanelPlane, planes

LAYOUT = planes("q3_K", QS, PanelPlane("hmask", 4), SCALES, D)
