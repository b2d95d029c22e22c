"""nvfp4: 4-bit floats, a scale for each 16, `x = scale[d] twice[q]` (ggml's `block_nvfp4`).

E2M1 values as mxfp4's, twice as large and therefore whole numbers. Scales are E4M3 floats without a
sign, half as large.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import MXFP4_TWICE, Bytes, Floats, bit_fields, scaled
from localkv.quant_formats.shared.cpu.panel_layout import QS, PanelPlane, planes

_TWICE = np.array(MXFP4_TWICE, np.int8)


def _scales() -> Floats:
    """Half of each number of 4 bits of exponent (bias 7) and 3 of mantissa, by its byte.

    Bit 7 is ignored. Both zero and NaN (127) are 0, but with bit 7 set NaN is 480, as in gguf-py.
    """
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).astype(np.float32)
    normal = np.ldexp(8 + mantissa, exponent - 11)
    values = np.where(exponent == 0, np.ldexp(mantissa, -10), normal).astype(np.float32)
    values[127] = 0
    return values


SCALES = _scales()


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (4 bytes), qs (32 bytes) -> float32 [..., n_blocks * 64]."""
    d, qs = planes
    return scaled(_TWICE.take(bit_fields(qs, n_bits=4, run=8)), SCALES.take(d))


# how the CPU lays it out; see `shared/cpu`
LAYOUT = planes("nvfp4", QS, PanelPlane("d", 1))
