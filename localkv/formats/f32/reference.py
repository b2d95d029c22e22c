"""f32: IEEE single precision, 4 bytes a value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localkv.formats.bits import as_bytes, reinterpret


def decode(planes: Sequence[Tensor]) -> Tensor:
    """uint8 [..., n, 4] -> float32 [..., n]; a view of the bytes where torch allows one."""
    return reinterpret(planes[0], torch.float32).flatten(-2)


def encode(x: Tensor) -> tuple[Tensor, ...]:
    """[..., n] -> uint8 [..., n, 4]."""
    return (as_bytes(x.to(torch.float32)),)
