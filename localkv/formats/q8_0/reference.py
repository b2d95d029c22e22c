"""q8_0: 32 signed bytes and a scale, `x = d q` (ggml's `block_q8_0`, `dequantize_row_q8_0`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.formats.bits import Bytes, Floats, half, half_bytes, ieee, scaled
from localkv.formats.rounding import blocks, rounded, scale_and_inverse


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (32 int8) -> float32 [..., n_blocks * 32]."""
    d, qs = planes
    return scaled(qs.view(np.int8), half(d))


@ieee
def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, qs, halves rounded away from zero (ggml's `quantize_row_q8_0_ref`)."""
    x = blocks(x, 32)
    d, inverse = scale_and_inverse(np.abs(x).max(-1, keepdims=True), 127)
    return half_bytes(d), rounded(x * inverse, 127).view(np.uint8)
