"""iq1_m on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import QS, PanelPlane, planes

HIGH, SCALES = PanelPlane("qh", 2), PanelPlane("scales", 2)
LAYOUT = planes("iq1_m", QS, HIGH, SCALES)
