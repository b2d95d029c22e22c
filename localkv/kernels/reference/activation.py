"""Activations between the matrices of a feed-forward block, and their gating (Shazeer 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from localkv.arch.spec import Activation


def gated(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up, elementwise; GELU in its tanh form."""
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
