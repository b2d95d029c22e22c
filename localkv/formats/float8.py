"""Rounding to 8-bit floats: a sign, an exponent, and two or three bits of mantissa."""

from __future__ import annotations

import numpy as np

from localkv.formats.bits import Bytes, Floats, ieee

SIGN, MAGNITUDE, INFINITY, NAN_CODE = 0x80, 0x7FFFFFFF, 0x7F800000, 0x7F


@ieee
def float8_codes(x: Floats, n_mantissa: int, largest: float) -> Bytes:
    """Rounded to nearest even: float32 [..., n] -> uint8 of the same shape.

    What is beyond `largest`, infinities included, becomes `largest`; a NaN stays one.
    """
    bias = (1 << (6 - n_mantissa)) - 1
    bits = np.clip(x, -largest, largest).view(np.uint32)
    magnitude = bits & MAGNITUDE
    dropped = 23 - n_mantissa
    half_less = (1 << (dropped - 1)) - 1
    rounded = (magnitude + half_less + ((magnitude >> dropped) & 1)) >> dropped
    codes = rounded - ((127 - bias) << n_mantissa)
    # the last bit of this number counts as much as that of a subnormal result
    coarse = np.float32(2.0 ** (24 - bias - n_mantissa))
    subnormal = (magnitude.view(np.float32) + coarse).view(np.uint32) - coarse.view(np.uint32)
    codes = np.where(magnitude < (128 - bias) << 23, subnormal, codes)
    codes[magnitude > INFINITY] = NAN_CODE
    return (codes | ((bits >> 24) & SIGN)).astype(np.uint8)
