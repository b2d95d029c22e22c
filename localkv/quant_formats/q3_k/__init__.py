"""q3_K: 3-bit codes, 16 groups of 16, `x = d (scale - 32) (q - 4)` (ggml's `block_q3_K`).

Bits 0 and 1 of the codes are in `qs`, bit 2 in `hmask`.
"""

from __future__ import annotations

from collections.abc import Sequence

from localkv.quant_formats.shared.bits import (
    Bytes,
    Floats,
    bit_fields,
    half_times,
    less,
    q3_k_codes,
    scaled,
)
from localkv.quant_formats.shared.cpu.panel_layout import QS, SCALES, D, PanelPlane, planes


def decode(planes: Sequence[Bytes]) -> Floats:
    """hmask (32 bytes), qs (64), scales (12), d (fp16) -> float32 [..., n_blocks * 256]."""
    hmask, qs, scales, d = planes
    codes = bit_fields(qs, n_bits=2, run=32) | (bit_fields(hmask, n_bits=1, run=32) << 2)
    return scaled(less(codes, 4), half_times(d, less(q3_k_codes(scales), 32)))


# how the CPU lays it out; see `shared/cpu`
LAYOUT = planes("q3_K", QS, PanelPlane("hmask", 4), SCALES, D)
