"""The threads of the CPU's kernels: as many as torch has, in OpenMP's pool where Numba has one.

An OpenMP region starts in a microsecond, one of Numba's own pool in twenty or more.
"""

from __future__ import annotations

import numba
import torch

numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def use_torch_threads() -> int:
    """Let this thread's parallel kernels have `torch.get_num_threads()` threads; how many."""
    n_threads: int = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(n_threads)
    return n_threads
