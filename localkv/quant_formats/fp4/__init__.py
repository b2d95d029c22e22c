"""Four-bit floats, E2M1, with scales: ggml's mxfp4 and nvfp4.

`TWICE` holds twice the values, which are whole numbers; scales are half as large, as ggml's are.

mxfp4 is the microscaling format of the Open Compute Project (MX v1.0): 32 values under an E8M0
scale, a power of two, `x = 2^(e - 128) twice[q]` (`block_mxfp4`). nvfp4 has a scale for each 16 of
64 values, an E4M3 float without a sign: `x = scale[d] twice[q]` (`block_nvfp4`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from localkv.quant_formats.shared.bits import Bytes, Floats, bit_fields, scaled
from localkv.quant_formats.shared.cpu.panel_layout import EXPONENT, QS, PanelPlane, planes

TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the sixteen values, whose bit 3 is the sign (ggml's `kvalues_mxfp4`)."""
_TWICE = np.array(TWICE, np.int8)
MXFP4_SCALES = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)
"""By e; ggml knows neither a NaN (255) nor a zero among them."""


def decode_mxfp4(planes: Sequence[Bytes]) -> Floats:
    """e (1 byte), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    e, qs = planes
    return scaled(_TWICE.take(bit_fields(qs, n_bits=4, run=16)), MXFP4_SCALES.take(e))


def exponent_bounds() -> NDArray[np.int32]:
    """From which bits on a float's logarithm rounds up to the next whole number, by its exponent's
    bits: int32 [256].

    `floorf(log2f(x))`, which gives a block's scale, is then one more than the float's exponent.
    """
    exponents = np.arange(1, 255)
    steps = np.arange(64)
    bits = (((exponents + 1) << 23)[:, None] - 1 - steps).astype(np.int32)
    logarithms = np.log2(bits.view(np.float32).astype(np.float64)).astype(np.float32)
    n_rounded = (logarithms == (exponents - 126)[:, None]).sum(1)
    bounds = np.full(256, (1 << 31) - 1, np.int32)
    bounds[1:255] = ((exponents + 1) << 23) - n_rounded
    return bounds


def _nvfp4_scales() -> Floats:
    """Half of each number of 4 bits of exponent (bias 7) and 3 of mantissa, by its byte.

    Bit 7 is ignored. Both zero and NaN (127) are 0, but with bit 7 set NaN is 480, as in gguf-py.
    """
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).astype(np.float32)
    normal = np.ldexp(8 + mantissa, exponent - 11)
    values = np.where(exponent == 0, np.ldexp(mantissa, -10), normal).astype(np.float32)
    values[127] = 0
    return values


NVFP4_SCALES = _nvfp4_scales()


def decode_nvfp4(planes: Sequence[Bytes]) -> Floats:
    """d (4 bytes), qs (32 bytes) -> float32 [..., n_blocks * 64]."""
    d, qs = planes
    return scaled(_TWICE.take(bit_fields(qs, n_bits=4, run=8)), NVFP4_SCALES.take(d))


mxfp4 = SimpleNamespace(
    quantizing_table=exponent_bounds,
    LAYOUT=planes("mxfp4", QS, EXPONENT),
    SCALES=MXFP4_SCALES,
    decode=decode_mxfp4,
)
nvfp4 = SimpleNamespace(
    LAYOUT=planes("nvfp4", QS, PanelPlane("d", 1)), SCALES=NVFP4_SCALES, decode=decode_nvfp4
)
