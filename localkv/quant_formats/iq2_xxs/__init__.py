"""iq2_xxs: points of a grid with signs, 8 groups of 32, `x = d (2 s + 1) / 8 grid[q]`.

ggml's `block_iq2_xxs`. Eight bytes for each group: four codes; then a word of four times 7 bits of
signs (the eighth makes their number even), and 4 bits of scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import EIGHTH, Bytes, Floats, half_times, reinterpret, scaled
from localkv.quant_formats.shared.cpu.panel_layout import QS, D, planes
from localkv.quant_formats.shared.grids import IQ2_XXS, signed_points, signs_and_factors


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (64 bytes) -> float32 [..., n_blocks * 256]."""
    d, qs = planes
    groups = qs.reshape(*qs.shape[:-1], 8, 8)
    entries = groups[..., :4].reshape(*qs.shape[:-1], 32)
    signs, factors = signs_and_factors(reinterpret(qs, np.uint32)[..., 1::2])
    return scaled(signed_points(IQ2_XXS, entries, signs), half_times(d, factors) * EIGHTH)


# how the CPU lays it out; see `shared/cpu`
LAYOUT = planes("iq2_xxs", QS, D)
