"""The Hadamard transform of arrays on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.addresses import Floats, address
from localkv.kernels.cpu.attention.kernels import run
from localkv.kernels.cpu.store.job import RotateJob
from localkv.system.threads import n_threads

MANY_VALUES = 1 << 16
"""From this number on, a second thread is worth its start."""


def rotate_cpu(x: Floats, block: int) -> Floats:
    """As `hadamard_transform`, bit for bit, for float32."""
    if block == 0:
        return x
    if block & (block - 1) or x.shape[-1] % block:
        raise ValueError(f"a Hadamard transform of {block} does not fit {x.shape[-1]} channels")
    if x.dtype != np.float32:
        raise BoundsError(f"a Hadamard transform of {x.dtype}")
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    job = RotateJob(0, x.size // block, block, address(x), address(out))
    items = cast("Sequence[int]", job)  # no names among them
    run("store/rotate_rows", items, n_threads() if x.size >= MANY_VALUES else 1)
    return out
