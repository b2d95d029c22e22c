"""iq4_xs: iq4_nl's codebook, 8 groups of 32, `x = d (scale - 32) codebook[q]` (`block_iq4_xs`).

The low 4 bits of the 8 scales are in `scales_l`, the high 2 in `scales_h`.
"""

from __future__ import annotations

from collections.abc import Sequence

from localkv.quant_formats.shared.bits import (
    Bytes,
    Floats,
    half_times,
    iq4_values,
    iq4_xs_codes,
    less,
    scaled,
)
from localkv.quant_formats.shared.cpu.panel_layout import QS, D, PanelPlane, planes


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), scales_h, scales_l (2, 4 bytes), qs (128) -> float32 [..., n_blocks * 256]."""
    d, scales_h, scales_l, qs = planes
    return scaled(iq4_values(qs), half_times(d, less(iq4_xs_codes(scales_h, scales_l), 32)))


# how the CPU lays it out; see `shared/cpu`
LAYOUT = planes("iq4_xs", QS, PanelPlane("scales_l", 1), PanelPlane("scales_h", 1), D)
