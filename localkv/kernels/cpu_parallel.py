"""Running a compiled worker on several threads.

A *worker* is a C function of two int64: the address of a job, which is an array of int64 of the
worker's own making, and the number of the thread. Workers take pieces of the job one after the
other from a counter in it (`simd.memory.take_next`), so a thread that another program slows down
holds up nobody for longer than one piece.
"""

from __future__ import annotations

from typing import Any

import numba
from numba import njit, prange

from localkv.simd.memory import call_address

CACHE = False  # generated copies are compiled into the user's cache

# OpenMP starts a parallel region in about a microsecond, workqueue in 20 to 50
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


@njit("void(int64, int64, int64)", parallel=True, nogil=True, cache=CACHE)
def run_workers(worker: Any, job: Any, n_threads: Any) -> None:
    """worker(job, i) for each thread i."""
    for i in prange(n_threads):
        call_address(worker, (job, i))
