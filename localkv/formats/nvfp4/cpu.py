"""nvfp4 on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import QS, PanelPlane, planes

LAYOUT = planes("nvfp4", QS, PanelPlane("d", 1))
