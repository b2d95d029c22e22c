"""q2_K: 2-bit codes, 16 groups of 16, `x = d scale q - dmin min` (ggml's `block_q2_K`).

A byte of `scales` holds a group's scale in its low and its minimum in its high 4 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from localkv.quant_formats.shared.bits import Bytes, Floats, bit_fields, half_times, scaled
from localkv.quant_formats.shared.cpu.panel_layout import DMIN, QS, SCALES, D, planes


def decode(planes: Sequence[Bytes]) -> Floats:
    """scales (16 bytes), qs (64 bytes), d, dmin (fp16) -> float32 [..., n_blocks * 256]."""
    scales, qs, d, dmin = planes
    codes = bit_fields(qs, n_bits=2, run=32)
    return scaled(codes, half_times(d, scales & 15), minimum=half_times(dmin, scales >> 4))


# how the CPU lays it out; see `shared/cpu`
LAYOUT = planes("q2_K", QS, SCALES, D, DMIN)
