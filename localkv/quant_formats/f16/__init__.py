"""f16: IEEE half precision, 2 bytes a value (ggml's `ggml_half`)."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.quant_formats.shared.bits import Bytes, Floats, half, half_bytes
from localkv.quant_formats.shared.cpu.page_order import codes


def decode(planes: Sequence[Bytes]) -> Floats:
    """uint8 [..., n, 2] -> float32 [..., n]."""
    return half(planes[0])[..., 0]


def encode(x: Floats) -> tuple[Bytes, ...]:
    """[..., n] -> uint8 [..., n, 2], rounded to nearest even, to infinity above 65504."""
    return (half_bytes(x[..., None]),)


# how the CPU lays it out; see `shared/cpu`
BLOCK = 16
SCALED = False
AFFINE = False
PLANES = (codes(16),)
