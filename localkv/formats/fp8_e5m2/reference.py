"""fp8_e5m2: 5 bits of exponent, 2 of mantissa (OCP's OFP8 E5M2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.formats.bits import Bytes, Floats
from localkv.formats.float8 import float8_codes

LARGEST = 57344.0
with np.errstate(invalid="ignore"):  # some CPUs say so of NaNs
    VALUES = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
"""The values of all codes, which are the upper halves of fp16 numbers."""


def decode(planes: Sequence[Bytes]) -> Floats:
    """uint8 [..., n, 1] -> float32 [..., n]."""
    return VALUES.take(planes[0][..., 0])


def encode(x: Floats) -> tuple[Bytes, ...]:
    """[..., n] -> uint8 [..., n, 1], rounded to nearest even; larger values become the largest.

    Infinities do so too: an outlier costs its own precision, not the whole row's attention.
    """
    return (float8_codes(x, 2, LARGEST)[..., None],)
