"""The number of threads that kernels run on: one for each physical core unless the user says so."""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import dataclass

from localkv.errors import counted
from localkv.system.processor import physical_cores, usable_cores


@functools.cache
def default_threads(cpus: frozenset[int] = frozenset()) -> int:
    """`OMP_NUM_THREADS`, as far as there are cores, or else the physical cores.

    A second thread on a core shares its vector units, which kernels keep busy.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isascii() and asked.isdigit() and int(asked) > 0:
        return min(int(asked), usable_cores())
    return physical_cores(cpus)


class _Chosen(threading.local):
    n: int | None = None
    n_batch: int | None = None
    now: int | None = None


_chosen = _Chosen()


@dataclass(frozen=True)
class Threads:
    """Numbers of threads: for one token, and for several at once, as prompts have them."""

    one: int
    several: int

    def __str__(self) -> str:
        return str(self.one) if self.one == self.several else f"{self.one}/{self.several}"

    def in_words(self) -> str:
        more = f", {self.several} for prompts" if self.several != self.one else ""
        return counted(self.one, "thread") + more

    def of(self, n_tokens: int) -> int:
        return self.one if n_tokens == 1 else self.several


def n_threads() -> int:
    """Threads for kernels that this thread calls now."""
    return _chosen.now or default_threads()


def chosen_threads() -> Threads:
    """What `use_threads` has said for models that this thread loads."""
    n = _chosen.n or default_threads()
    return Threads(n, _chosen.n_batch or n)


def use_threads(n: int, n_batch: int | None = None) -> None:
    """Let kernels that this thread calls run on `n` threads, from now on, and engines that it makes
    on `n_batch` where they evaluate several tokens."""
    _chosen.n, _chosen.n_batch, _chosen.now = n, n_batch, n


def use_threads_now(n: int) -> None:
    """Let kernels that this thread calls run on `n` threads, until another number is said."""
    _chosen.now = n
