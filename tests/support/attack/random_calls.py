"""What random calls of kernels have in common; see `kernel_cases.py`."""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor

from localkv.kernels.cpu.runtime import chain as chains
from localkv.system.threads import use_threads
from support.torch_edge import numpy_of


def Memory(x: Any, n_bytes: int) -> chains.Memory:  # noqa: N802
    """A job's memory in a tensor or a place."""
    return chains.Memory(numpy_of(x), n_bytes)


def threads(rng: random.Random) -> int:
    n = rng.choice((1, 1, 2, 3))
    use_threads(n)
    return n


def close(got: Tensor, want: Tensor) -> None:
    assert not got.isnan().any()
    assert float((got - want).norm()) <= 1e-5 * float(want.norm()) + 1e-30
