"""q4_K: 4-bit codes, 8 groups of 32, `x = d scale q - dmin min` (ggml's `block_q4_K`)."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.quant_formats.shared.bits import Bytes, Floats, bit_fields, q4_k_scales, scaled
from localkv.quant_formats.shared.cpu.panel_layout import DMIN, QS, SCALES, D, planes


def decode(planes: Sequence[Bytes]) -> Floats:
    """d, dmin (fp16), scales (12 bytes), qs (128 bytes) -> float32 [..., n_blocks * 256]."""
    scale, minimum = q4_k_scales(planes)
    return scaled(bit_fields(planes[3], n_bits=4, run=32), scale, minimum)


# how the CPU lays it out; see `shared/cpu`
LAYOUT = planes("q4_K", QS, SCALES, D, DMIN)
