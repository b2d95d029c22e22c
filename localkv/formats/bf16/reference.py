"""bf16: the upper half of an IEEE single, 2 bytes a value (ggml's `ggml_bf16_t`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localkv.formats.bits import as_bytes, reinterpret


def decode(planes: Sequence[Tensor]) -> Tensor:
    """uint8 [..., n, 2] -> float32 [..., n]."""
    return reinterpret(planes[0], torch.bfloat16).to(torch.float32).flatten(-2)


def encode(x: Tensor) -> tuple[Tensor, ...]:
    """[..., n] -> uint8 [..., n, 2], rounded to nearest even."""
    return (as_bytes(x.to(torch.bfloat16)),)
