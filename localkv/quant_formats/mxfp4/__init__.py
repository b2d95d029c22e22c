"""mxfp4: 4-bit floats and a power of two, `x = 2^(e - 128) twice[q]` (ggml's `block_mxfp4`).

The microscaling format of the Open Compute Project (MX v1.0): E2M1 values under an E8M0 scale. As
ggml does, `TWICE` holds twice the values, whole numbers, and the scale is half as large.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import MXFP4_TWICE, Bytes, Floats, bit_fields, scaled
from localkv.quant_formats.shared.cpu.panel_layout import EXPONENT, QS, planes

_TWICE = np.array(MXFP4_TWICE, np.int8)
SCALES = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)
"""By e; ggml knows neither a NaN (255) nor a zero among them."""


def decode(planes: Sequence[Bytes]) -> Floats:
    """e (1 byte), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    e, qs = planes
    return scaled(_TWICE.take(bit_fields(qs, n_bits=4, run=16)), SCALES.take(e))


# how the CPU lays it out; see `shared/cpu`
LAYOUT = planes("mxfp4", QS, EXPONENT)
