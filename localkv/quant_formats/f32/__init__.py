"""f32: IEEE single precision, 4 bytes a value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import Bytes, Floats, as_bytes, reinterpret
from localkv.quant_formats.shared.cpu.page_order import codes


def decode(planes: Sequence[Bytes]) -> Floats:
    """uint8 [..., n, 4] -> float32 [..., n]; a view of the bytes where NumPy allows one."""
    return reinterpret(planes[0], np.float32)[..., 0]


def encode(x: Floats) -> tuple[Bytes, ...]:
    """[..., n] -> uint8 [..., n, 4]."""
    return (as_bytes(x),)


# how the CPU lays it out; see `shared/cpu`
BLOCK = 16
SCALED = False
AFFINE = False
PLANES = (codes(32),)
