"""CPU: float32 arithmetic on packed weights and a packed cache, decoded a tile at a time."""

from __future__ import annotations

import torch

from localkv.kernels.attention import attention_tiled
from localkv.kernels.backend import Backend, Primitives, compose


def cpu_backend() -> Backend:
    """The backend of machines without a supported GPU."""
    return compose(
        "cpu",
        Primitives(attention=attention_tiled),
        dtype=torch.float32,
        kernels={
            "attention": "tiled online softmax, torch float32",
            "linear": "decode by tile, torch float32",
        },
    )
