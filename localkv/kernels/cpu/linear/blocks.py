"""How the panels of weights lie in memory, by format: what their `cpu.py` says."""

from __future__ import annotations

from localkv.formats import FORMATS
from localkv.formats.cpu.panel_layout import PanelLayout
from localkv.kernels.cpu.linear.panel_bytes import PANEL_FORMAT_NAMES

LAYOUTS: dict[str, PanelLayout] = {
    name: FORMATS[name].part("cpu").LAYOUT for name in PANEL_FORMAT_NAMES
}
