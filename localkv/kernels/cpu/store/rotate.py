"""The Hadamard transform of tensors on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.attention.kernels import n_threads, run
from localkv.kernels.cpu.store.job import RotateJob

MANY_VALUES = 1 << 16
"""From this number on, a second thread is worth its start."""


def rotate_cpu(x: Tensor, block: int) -> Tensor:
    """As `hadamard_transform`, bit for bit, for float32."""
    if block == 0:
        return x
    if block & (block - 1) or x.shape[-1] % block:
        raise ValueError(f"a Hadamard transform of {block} does not fit {x.shape[-1]} channels")
    if x.dtype != torch.float32:
        raise BoundsError(f"a Hadamard transform of {x.dtype}")
    x = x.contiguous()
    out = torch.empty_like(x)
    job = RotateJob(0, x.numel() // block, block, x.data_ptr(), out.data_ptr())
    run("store/rotate_rows", job, n_threads() if x.numel() >= MANY_VALUES else 1)
    return out
