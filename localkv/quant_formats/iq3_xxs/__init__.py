"""iq3_xxs: points of a grid with signs, 8 groups of 32, `x = d (2 s + 1) / 4 grid[q]`.

ggml's `block_iq3_xxs`. A byte of `qs` selects 4 values. A word of `signs` is four times 7 bits of
signs (the eighth makes their number even), and 4 bits of scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import Bytes, Floats, half_times, reinterpret, scaled
from localkv.quant_formats.shared.cpu.panel_layout import QS, D, PanelPlane, planes
from localkv.quant_formats.shared.grids import IQ3_XXS, signed_points, signs_and_factors


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (64 bytes), signs (8 words) -> float32 [..., n_blocks * 256]."""
    d, qs, signs = planes
    patterns, factors = signs_and_factors(reinterpret(signs, np.uint32))
    return scaled(signed_points(IQ3_XXS, qs, patterns), half_times(d, factors) * np.float32(0.25))


# how the CPU lays it out; see `shared/cpu`
SIGNS = PanelPlane("signs", 4)
LAYOUT = planes("iq3_xxs", QS, SIGNS, D)
