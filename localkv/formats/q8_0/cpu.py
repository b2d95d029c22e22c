"""q8_0 on the CPU, without Numba; planes d, qs."""

from __future__ import annotations

from localkv.formats.cpu.page_order import SCALES, codes
from localkv.formats.cpu.panel_layout import FLIP_SIGNS, D, PanelPlane, planes

BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (SCALES, codes(8, rows=2, unit_items=2))

OFFSET = 128

LAYOUT = planes("q8_0", PanelPlane("qs", 4, FLIP_SIGNS), D)
