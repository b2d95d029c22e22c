"""The number of threads that kernels run on: one for each physical core unless the user says so."""

from __future__ import annotations

import functools
import os
import threading

from localkv.system.processor import physical_cores, usable_cores


@functools.cache
def default_threads() -> int:
    """`OMP_NUM_THREADS`, as far as there are cores, or else the physical cores.

    A second thread on a core shares its vector units, which kernels keep busy.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isascii() and asked.isdigit() and int(asked) > 0:
        return min(int(asked), usable_cores())
    return physical_cores()


class _Chosen(threading.local):
    n: int | None = None


_chosen = _Chosen()


def n_threads() -> int:
    """Threads for kernels that this thread calls."""
    return _chosen.n or default_threads()


def use_threads(n: int) -> None:
    """Let kernels that this thread calls run on `n` threads, from now on."""
    _chosen.n = n
