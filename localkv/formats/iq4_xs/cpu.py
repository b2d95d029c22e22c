"""iq4_xs on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import QS, D, PanelPlane, planes

LAYOUT = planes("iq4_xs", QS, PanelPlane("scales_l", 1), PanelPlane("scales_h", 1), D)
