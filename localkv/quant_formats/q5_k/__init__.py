"""q5_K: 5-bit codes, 8 groups of 32, `x = d scale q - dmin min` (ggml's `block_q5_K`).

Bits 0 to 3 of the codes are in `qs`; bit i of byte j of `qh` is bit 4 of code j of group i.
"""

from __future__ import annotations

from collections.abc import Sequence

from localkv.quant_formats.shared.bits import Bytes, Floats, bit_fields, q4_k_scales, scaled
from localkv.quant_formats.shared.cpu.panel_layout import DMIN, QS, SCALES, D, PanelPlane, planes


def decode(planes: Sequence[Bytes]) -> Floats:
    """d, dmin (fp16), scales (12 bytes), qh (32), qs (128) -> float32 [..., n_blocks * 256]."""
    scale, minimum = q4_k_scales(planes)
    qh, qs = planes[3:]
    codes = bit_fields(qs, n_bits=4, run=32) | (bit_fields(qh, n_bits=1, run=32) << 4)
    return scaled(codes, scale, minimum)


# how the CPU lays it out; see `shared/cpu`
LAYOUT = planes("q5_K", QS, PanelPlane("qh", 4), SCALES, D, DMIN)
