"""Running a worker on threads of Numba's, where `thread_pool` has none of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numba
from numba import njit, prange

from localkv.simd.kinds import Address, Count
from localkv.simd.memory import call_address

# OpenMP starts a parallel region in about a microsecond, workqueue in 20 to 50
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def _run_workers(worker: Address, job: Address, n_threads: Count) -> None:
    """worker(job, i) for each thread i."""
    for i in prange(n_threads):
        call_address(worker, (job, i))


@functools.cache
def run_workers() -> Callable[[int, int, int], None]:
    """The compiled loop: (worker, job, threads), in Numba's own cache if that can be written."""
    options = {"parallel": True, "nogil": True}
    try:
        compiled = njit("void(int64, int64, int64)", cache=True, **options)(_run_workers)
    except RuntimeError:  # there is no place for the cache
        compiled = njit("void(int64, int64, int64)", **options)(_run_workers)
    function: Callable[[int, int, int], None] = compiled
    return function
