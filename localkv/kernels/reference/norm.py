"""Norms of rows: RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016)."""

from __future__ import annotations

import torch
from torch import Tensor

from localkv.kernels.layer_weights import Norm


def norm(x: Tensor, norm: Norm) -> Tensor:
    """x along its last axis, normed and weighted; same shape and dtype as `x`.

    RMSNorm: x / sqrt(mean(x^2) + eps) * weight. LayerNorm takes the mean off x first, and adds its
    bias, if it has one.
    """
    if norm.spec.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.spec.eps) * norm.weight
    return y if norm.bias is None else y + norm.bias
