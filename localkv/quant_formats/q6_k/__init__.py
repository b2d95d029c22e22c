"""q6_K: 6-bit codes, 16 groups of 16, `x = d scale (q - 32)` (ggml's `block_q6_K`).

Bits 0 to 3 of the codes are in `ql`, bits 4 and 5 in `qh`; the scales are signed bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import Bytes, Floats, bit_fields, half_times, less, scaled
from localkv.quant_formats.shared.cpu.panel_layout import SCALES, D, PanelPlane, planes


def decode(planes: Sequence[Bytes]) -> Floats:
    """ql (128 bytes), qh (64), scales (16 int8), d (fp16) -> float32 [..., n_blocks * 256]."""
    ql, qh, scales, d = planes
    codes = bit_fields(ql, n_bits=4, run=64) | (bit_fields(qh, n_bits=2, run=32) << 4)
    return scaled(less(codes, 32), half_times(d, scales.view(np.int8)))


# how the CPU lays it out; see `shared/cpu`
# what is read together lies together, or the processor does not recognise a stream
CODES = [PanelPlane(name, 4, part=i, n_parts=2) for i in range(2) for name in ("ql", "qh")]
LAYOUT = planes("q6_K", *CODES, SCALES, D)
