"""fp8_e4m3: 4 bits of exponent, 3 of mantissa, no infinities (OCP's OFP8 E4M3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localkv.formats.bits import as_bytes, reinterpret

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def decode(planes: Sequence[Tensor]) -> Tensor:
    """uint8 [..., n, 1] -> float32 [..., n]."""
    return reinterpret(planes[0], torch.float8_e4m3fn).to(torch.float32).flatten(-2)


def encode(x: Tensor) -> tuple[Tensor, ...]:
    """[..., n] -> uint8 [..., n, 1], rounded to nearest even; larger values become the largest.

    Infinities do so too: an outlier costs its own precision, not the whole row's attention.
    """
    return (as_bytes(x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)),)
