"""iq1_s: points of a ternary grid, 8 groups of 32, `x = d (2 s + 1) (grid[q] +- 1/8)`.

ggml's `block_iq1_s`. The lower 8 bits of four codes are bytes of `qs`. A word of `qh` holds their
upper 3 bits each, then 3 bits of the group's scale, then the sign of its shift.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import EIGHTH, Bytes, Floats, half_times, reinterpret, scaled
from localkv.quant_formats.shared.cpu.panel_layout import QS, D, PanelPlane, planes
from localkv.quant_formats.shared.grids import grid_entries, shifted_points


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (32 bytes), qh (8 words) -> float32 [..., n_blocks * 256]."""
    d, qs, qh = planes
    words = reinterpret(qh, np.uint16)
    upper = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7
    is_lower = np.repeat(words >> 15, 4, axis=-1)
    codes = shifted_points(grid_entries(qs, upper), is_lower)
    return scaled(codes, half_times(d, 2 * ((words >> 12) & 7) + 1) * EIGHTH)


# how the CPU lays it out; see `shared/cpu`
HIGH = PanelPlane("qh", 2)
LAYOUT = planes("iq1_s", QS, HIGH, D)
