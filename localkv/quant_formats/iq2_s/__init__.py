"""iq2_s: points of a grid with signs, 16 groups of 16, `x = d (2 s + 1) / 8 grid[q]`.

ggml's `block_iq2_s`. Codes have 10 bits, the upper 2 in `qh`; scales are nibbles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import EIGHTH, Bytes, Floats, bit_fields, half_times, scaled
from localkv.quant_formats.shared.cpu.panel_layout import QS, SCALES, D, PanelPlane, planes
from localkv.quant_formats.shared.grids import IQ2_S, signed_points


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs, signs (32 bytes), qh, scales (8) -> float32 [..., n_blocks * 256]."""
    d, qs, signs, qh, scales = planes
    entries = qs | (bit_fields(qh, n_bits=2, run=1).astype(np.uint16) << 8)
    factors = 2 * bit_fields(scales, n_bits=4, run=1) + 1
    return scaled(signed_points(IQ2_S, entries, signs), half_times(d, factors) * EIGHTH)


# how the CPU lays it out; see `shared/cpu`
SIGNS, HIGH = PanelPlane("signs", 4), PanelPlane("qh", 1)
LAYOUT = planes("iq2_s", QS, SIGNS, HIGH, SCALES, D)
