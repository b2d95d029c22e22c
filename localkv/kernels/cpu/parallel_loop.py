"""Running a worker on threads of Numba's, where `thread_pool` has none of its own."""

from __future__ import annotations

from typing import Any

import numba
from numba import njit, prange

from localkv.simd.memory import call_address

CACHE = False

# OpenMP starts a parallel region in about a microsecond, workqueue in 20 to 50
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


@njit("void(int64, int64, int64)", parallel=True, nogil=True, cache=CACHE)
def run_workers(worker: Any, job: Any, n_threads: Any) -> None:
    """worker(job, i) for each thread i."""
    for i in prange(n_threads):
        call_address(worker, (job, i))
