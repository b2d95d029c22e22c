"""iq1_s on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import QS, D, PanelPlane, planes

HIGH = PanelPlane("qh", 2)
LAYOUT = planes("iq1_s", QS, HIGH, D)
