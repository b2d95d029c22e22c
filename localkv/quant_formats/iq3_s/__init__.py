"""iq3_s: points of a grid with signs, 8 groups of 32, `x = d (2 s + 1) grid[q]` (`block_iq3_s`).

Codes of 4 values have 9 bits, the upper one in `qh`; scales are nibbles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import Bytes, Floats, bit_fields, half_times, scaled
from localkv.quant_formats.shared.cpu.panel_layout import QS, SCALES, D, PanelPlane, planes
from localkv.quant_formats.shared.grids import IQ3_S, signed_points


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (64 bytes), qh (8), signs (32), scales (4) -> float32 [..., n_blocks * 256]."""
    d, qs, qh, signs, scales = planes
    entries = qs | (np.unpackbits(qh, axis=-1, bitorder="little").astype(np.uint16) << 8)
    factors = 2 * bit_fields(scales, n_bits=4, run=1) + 1
    return scaled(signed_points(IQ3_S, entries, signs), half_times(d, factors))


# how the CPU lays it out; see `shared/cpu`
SIGNS, HIGH = PanelPlane("signs", 4), PanelPlane("qh", 1)
LAYOUT = planes("iq3_s", QS, SIGNS, HIGH, SCALES, D)
