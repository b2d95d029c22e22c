"""The formats whose products have kernels on the CPU: those with a `cpu_weight.py`."""

from __future__ import annotations

from localkv.formats import FORMATS
from localkv.formats.cpu.panel_codes import PanelFormat
from localkv.kernels.cpu.linear.panel_bytes import PANEL_FORMAT_NAMES

PANEL_FORMATS: dict[str, PanelFormat] = {
    name: FORMATS[name].part("cpu_weight").PANELS for name in PANEL_FORMAT_NAMES
}
"""By name. A weight type that is missing is decoded tile by tile."""

LAYOUTS = {name: fmt.layout for name, fmt in PANEL_FORMATS.items()}
"""How their panels lie in memory."""
