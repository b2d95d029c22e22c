"""mxfp4 on the CPU, without Numba; planes e, qs."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import EXPONENT, QS, planes

LAYOUT = planes("mxfp4", QS, EXPONENT)
