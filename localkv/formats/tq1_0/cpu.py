"""tq1_0 on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import QS, D, PanelPlane, planes

LAYOUT = planes("tq1_0", QS, PanelPlane("qh", 4), D)
