"""The 8-bit floats of caches, OCP's OFP8: a sign, an exponent, and two or three bits of mantissa.

fp8_e4m3 has 4 bits of exponent, 3 of mantissa and no infinities; fp8_e5m2 has 5 bits of exponent
and 2 of mantissa. fp8_e4m3_token and fp8_e5m2_token have a scale per row as well, `x = d * value`
(`shared/rounding.py`). fp8_e4m3_head and fp8_e5m2_head have the codes of the first two: what stores
rows divides them by a scale of their layer and KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from localkv.quant_formats.shared.bits import Bytes, Floats, ieee
from localkv.quant_formats.shared.cpu.page_order import SCALES, codes
from localkv.quant_formats.shared.rounding import scale_row, times_row_scale

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
    # the last bit of this number counts as much as the last bit of a subnormal result
    coarse = np.float32(2.0 ** (24 - bias - n_mantissa))
    subnormal = (magnitude.view(np.float32) + coarse).view(np.uint32) - coarse.view(np.uint32)
    codes = np.where(magnitude < (128 - bias) << 23, subnormal, codes)
    codes[magnitude > INFINITY] = NAN_CODE
    return (codes | ((bits >> 24) & SIGN)).astype(np.uint8)


def _e4m3_values() -> Floats:
    """The values of all codes, by way of fp16, whose exponent has a bit more."""
    magnitudes = (np.arange(128, dtype=np.uint16) << 7).view(np.float16).astype(np.float32) * 256
    magnitudes[127] = np.nan
    return np.concatenate([magnitudes, -magnitudes])


def _e5m2_values() -> Floats:
    """The values of all codes, which are the upper halves of fp16 numbers."""
    with np.errstate(invalid="ignore"):  # some CPUs say so of NaNs
        return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


def _floats(values: Floats, n_mantissa: int, largest: float) -> SimpleNamespace:
    """Each value is a number of its own."""

    def decode(planes: Sequence[Bytes]) -> Floats:
        """uint8 [..., n, 1] -> float32 [..., n]."""
        return values.take(planes[0][..., 0])

    def encode(x: Floats) -> tuple[Bytes, ...]:
        """[..., n] -> uint8 [..., n, 1], rounded to nearest even; larger values become the largest.

        Infinities do so too: an outlier costs its own precision, not the whole row's attention.
        """
        return (float8_codes(x, n_mantissa, largest)[..., None],)

    return SimpleNamespace(
        BLOCK=16, SCALED=False, AFFINE=False, PLANES=(codes(8),), decode=decode, encode=encode
    )


def _scaled_rows(floats: SimpleNamespace, largest: float) -> SimpleNamespace:
    """Floats with a scale per row."""

    def decode(planes: Sequence[Bytes]) -> Floats:
        """values (uint8 [..., n, 1]), d (fp16, [..., 1, 2]) -> float32 [..., n]."""
        values, d = planes
        return times_row_scale(floats.decode([values]), d)

    def encode(x: Floats) -> tuple[Bytes, ...]:
        """float32 [..., n] -> values, d: scaled rows, rounded to nearest even."""
        d, scaled = scale_row(x, largest)
        return (*floats.encode(scaled), d)

    facts = {**vars(floats), "PLANES": (*floats.PLANES, SCALES)}
    return SimpleNamespace(**{**facts, "decode": decode, "encode": encode})


E4M3_LARGEST, E5M2_LARGEST = 448.0, 57344.0
fp8_e4m3 = _floats(_e4m3_values(), 3, E4M3_LARGEST)
fp8_e5m2 = _floats(_e5m2_values(), 2, E5M2_LARGEST)
fp8_e4m3_token = _scaled_rows(fp8_e4m3, E4M3_LARGEST)
fp8_e5m2_token = _scaled_rows(fp8_e5m2, E5M2_LARGEST)
