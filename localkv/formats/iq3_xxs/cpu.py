"""iq3_xxs on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import QS, D, PanelPlane, planes

SIGNS = PanelPlane("signs", 4)
LAYOUT = planes("iq3_xxs", QS, SIGNS, D)
