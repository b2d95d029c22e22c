"""iq3_s on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import QS, SCALES, D, PanelPlane, planes

SIGNS, HIGH = PanelPlane("signs", 4), PanelPlane("qh", 1)
LAYOUT = planes("iq3_s", QS, SIGNS, HIGH, SCALES, D)
