"""RoPE on heads."""

from __future__ import annotations

import torch
from torch import Tensor

from localkv.kernels.rope import RopeTable


def apply_rope(x: Tensor, table: RopeTable) -> Tensor:
    """Rotate the first n_dims channels of each head of x [tokens, heads, head_dim]."""
    n_dims = 2 * table.cos.shape[-1]
    rotated, rest = x[..., :n_dims], x[..., n_dims:]
    cos, sin = table.cos[:, None], table.sin[:, None]  # [tokens, 1, n_dims / 2]
    if table.interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((turned, rest), dim=-1)
