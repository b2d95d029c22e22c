"""iq2_xxs on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import QS, D, planes

LAYOUT = planes("iq2_xxs", QS, D)
