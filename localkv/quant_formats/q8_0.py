"""q8_0: 32 signed bytes and a scale, `x = d q` (ggml's `block_q8_0`, `dequantize_row_q8_0`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localkv.quant_formats.bits import half, scaled


def decode(planes: Sequence[Tensor]) -> Tensor:
    """d (fp16), qs (32 int8) -> float32 [..., n_blocks * 32]."""
    d, qs = planes
    return scaled(qs.view(torch.int8), half(d))
