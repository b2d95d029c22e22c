"""q4_K: nibbles, and scales and minima of 32 values each."""

from __future__ import annotations

from localkv.formats.cpu.panel_codes import PanelFormat
from localkv.formats.cpu.super_block_panels import k_minimum, k_nibbles, k_scale
from localkv.formats.q4_k import LAYOUT

PANELS = PanelFormat(LAYOUT, k_nibbles, k_scale, k_minimum)
