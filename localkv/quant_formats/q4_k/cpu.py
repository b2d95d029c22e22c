"""q4_K: nibbles, and scales and minima of 32 values each."""

from __future__ import annotations

from localkv.quant_formats.q4_k import LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import PanelFormat, k_minimum, k_nibbles, k_scale

PANELS = PanelFormat(LAYOUT, k_nibbles, k_scale, k_minimum)
