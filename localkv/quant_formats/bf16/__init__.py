"""bf16: the upper half of an IEEE single, 2 bytes a value (ggml's `ggml_bf16_t`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import Bytes, Floats, as_bytes, reinterpret
from localkv.quant_formats.shared.cpu.page_order import codes

QUIET = 0x40
"""The bit without which a NaN whose other bits are cut off would be an infinity."""


def decode(planes: Sequence[Bytes]) -> Floats:
    """uint8 [..., n, 2] -> float32 [..., n]."""
    upper = reinterpret(planes[0], np.uint16)[..., 0].astype(np.uint32)
    upper <<= 16
    return upper.view(np.float32)


def encode(x: Floats) -> tuple[Bytes, ...]:
    """[..., n] -> uint8 [..., n, 2], rounded to nearest even; a NaN keeps its sign and is quiet."""
    bits = x.view(np.uint32)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = np.isnan(x)
    upper[is_nan] = bits[is_nan] >> 16 | QUIET
    return (as_bytes(upper.astype(np.uint16)),)


# how the CPU lays it out; see `shared/cpu`
BLOCK = 16
SCALED = False
AFFINE = False
PLANES = (codes(16),)
