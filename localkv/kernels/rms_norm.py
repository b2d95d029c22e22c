"""RMSNorm (Zhang & Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, along the last axis; same shape and dtype as `x`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
