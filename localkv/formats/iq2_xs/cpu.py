"""iq2_xs on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import QS, SCALES, D, planes

LAYOUT = planes("iq2_xs", QS, SCALES, D)
