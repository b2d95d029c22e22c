"""q6_K on the CPU, without Numba."""

from __future__ import annotations

from localkv.formats.cpu.panel_layout import SCALES, D, PanelPlane, planes

# what is read together lies together, or the processor does not recognise a stream
CODES = [PanelPlane(name, 4, part=i, n_parts=2) for i in range(2) for name in ("ql", "qh")]
LAYOUT = planes("q6_K", *CODES, SCALES, D)
