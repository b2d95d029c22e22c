"""CPU: float32 arithmetic on packed weights and a packed cache, decoded a tile at a time."""

from __future__ import annotations

from functools import partial

import torch

from localkv.kernels.attention import attention_tiled
from localkv.kernels.backend import Backend, Primitives, compose
from localkv.kernels.cpu_linear import LINEAR_KERNEL, CpuProducts
from localkv.kernels.moe import moe_mlp


def cpu_backend() -> Backend:
    """The backend of machines without a supported GPU."""
    products = CpuProducts()
    return compose(
        "cpu",
        Primitives(
            attention=attention_tiled,
            linear=products.linear,
            moe_mlp=partial(moe_mlp, matmul=products.matmul, linear=products.linear),
            prepare=products.prepare,
        ),
        dtype=torch.float32,
        kernels={
            "attention": "tiled online softmax, torch float32",
            "linear": LINEAR_KERNEL,
        },
    )
