"""SwiGLU (Shazeer 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise."""
    return F.silu(gate) * up
