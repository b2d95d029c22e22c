"""q8_0: 32 signed bytes and a scale, `x = d q` (ggml's `block_q8_0`, `dequantize_row_q8_0`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localkv.formats.bits import half, half_bytes, scaled
from localkv.formats.rounding import blocks, scale_and_inverse, truncated

BELOW_HALF = 0.5 - 2**-25


def decode(planes: Sequence[Tensor]) -> Tensor:
    """d (fp16), qs (32 int8) -> float32 [..., n_blocks * 32]."""
    d, qs = planes
    return scaled(qs.view(torch.int8), half(d))


def encode(x: Tensor) -> tuple[Tensor, ...]:
    """float32 [..., n] -> d, qs, halves rounded away from zero (ggml's `quantize_row_q8_0_ref`)."""
    x = blocks(x, 32)
    d, inverse = scale_and_inverse(x.abs().amax(-1, keepdim=True), 127)
    y = x * inverse
    # C's roundf: the added value is less than a half, lest the float below 0.5 be rounded up to 1
    y.add_(torch.copysign(y.new_full((), BELOW_HALF), y))
    return half_bytes(d), truncated(y, -127, 127).view(torch.uint8)
