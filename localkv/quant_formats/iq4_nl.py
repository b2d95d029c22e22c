"""iq4_nl: 4-bit codes of a codebook and a scale, `x = d codebook[q]` (ggml's `block_iq4_nl`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from localkv.quant_formats.bits import half, iq4_values, scaled


def decode(planes: Sequence[Tensor]) -> Tensor:
    """d (fp16), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, qs = planes
    return scaled(iq4_values(qs), half(d))
