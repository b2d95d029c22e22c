"""fp8_e4m3: 4 bits of exponent, 3 of mantissa, no infinities (OCP's OFP8 E4M3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.formats.bits import Bytes, Floats
from localkv.formats.float8 import float8_codes

LARGEST = 448.0


def _values() -> Floats:
    """The values of all codes, by way of fp16, whose exponent has a bit more."""
    magnitudes = (np.arange(128, dtype=np.uint16) << 7).view(np.float16).astype(np.float32) * 256
    magnitudes[127] = np.nan
    return np.concatenate([magnitudes, -magnitudes])


VALUES = _values()


def decode(planes: Sequence[Bytes]) -> Floats:
    """uint8 [..., n, 1] -> float32 [..., n]."""
    return VALUES.take(planes[0][..., 0])


def encode(x: Floats) -> tuple[Bytes, ...]:
    """[..., n] -> uint8 [..., n, 1], rounded to nearest even; larger values become the largest.

    Infinities do so too: an outlier costs its own precision, not the whole row's attention.
    """
    return (float8_codes(x, 3, LARGEST)[..., None],)
