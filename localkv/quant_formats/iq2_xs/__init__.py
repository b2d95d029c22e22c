"""iq2_xs: points of a grid with signs, 16 groups of 16, `x = d (2 s + 1) / 8 grid[q]`.

ggml's `block_iq2_xs`. A word is 9 bits of code and 7 of signs; the eighth sign makes their number
even; scales are nibbles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import (
    EIGHTH,
    Bytes,
    Floats,
    bit_fields,
    half_times,
    reinterpret,
    scaled,
)
from localkv.quant_formats.shared.cpu.panel_layout import QS, SCALES, D, planes
from localkv.quant_formats.shared.grids import IQ2_XS, even_signs, signed_points


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (32 words), scales (8 bytes) -> float32 [..., n_blocks * 256]."""
    d, qs, scales = planes
    words = reinterpret(qs, np.uint16)
    signs = even_signs((words >> 9).astype(np.uint8))
    factors = 2 * bit_fields(scales, n_bits=4, run=1) + 1
    return scaled(signed_points(IQ2_XS, words & 511, signs), half_times(d, factors) * EIGHTH)


# how the CPU lays it out; see `shared/cpu`
LAYOUT = planes("iq2_xs", QS, SCALES, D)
