"""iq1_m: points of a ternary grid, 16 groups of 16, `x = d (2 s + 1) (grid[q] +- 1/8)`.

ggml's `block_iq1_m`. The lower 8 bits of codes are in `qs`; a nibble of `qh` has the upper 3 bits
of one, and the sign of its shift. A word of `scales` holds four scales of 3 bits; its upper 4 bits
are a quarter of d's.
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
from localkv.quant_formats.shared.cpu.panel_layout import QS, PanelPlane, planes
from localkv.quant_formats.shared.grids import grid_entries, shifted_points


def scale_bytes(scales: Bytes) -> Bytes:
    """d (fp16), which is spread over four words: uint8 [..., 8] -> [..., 2]."""
    quarters = scales[..., 1::2] >> 4
    return (quarters[..., ::2] | (quarters[..., 1::2] << 4)).astype(np.uint8)


def decode(planes: Sequence[Bytes]) -> Floats:
    """qs (32 bytes), qh (16), scales (4 words) -> float32 [..., n_blocks * 256]."""
    qs, qh, scales = planes
    high = bit_fields(qh, n_bits=4, run=1)
    words = reinterpret(scales, np.uint16)
    factors = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7
    factors = 2 * factors.reshape(*words.shape[:-1], 16) + 1
    codes = shifted_points(grid_entries(qs, high & 7), high >> 3)
    return scaled(codes, half_times(scale_bytes(scales), factors) * EIGHTH)


# how the CPU lays it out; see `shared/cpu`
HIGH, SCALES = PanelPlane("qh", 2), PanelPlane("scales", 2)
LAYOUT = planes("iq1_m", QS, HIGH, SCALES)
