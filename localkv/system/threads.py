"""How many threads kernels run on, and on which processors, where the user names some.

There is one thread for each physical core unless the user says otherwise. Nothing is pinned unless
the user names processors (Linux): the system moves threads, within what `taskset` or a container
allows.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from localkv.errors import UsageError, counted
from localkv.system.processor import list_of_cpus, physical_cores, usable_cores


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


_allowed: list[frozenset[int]] = []
"""The processors that were allowed before any were named; empty until it is asked for."""


@dataclass(frozen=True)
class Placement:
    """Processors that were named, in order; if `strict`, each thread of kernels has one of them."""

    cpus: tuple[int, ...] = ()
    strict: bool = False

    @property
    def mask(self) -> str:
        """The mask of the processors, as llama.cpp writes it; 0x0 if none were named."""
        return hex(sum(1 << cpu for cpu in self.cpus))

    def of_thread(self, index: int) -> frozenset[int]:
        """The processors for a thread. Thread 0 calls kernels; the others are its helpers."""
        return frozenset((self.cpus[index % len(self.cpus)],) if self.strict else self.cpus)


_placement = Placement()


def placement() -> Placement:
    """What `place_process` was told."""
    return _placement


_helpers = dict[int, int]()
"""Thread id in the system -> index."""


def allowed_cpus() -> frozenset[int]:
    """The processors that the system allows this process, whatever `place_process` has chosen.

    Raises:
        UsageError: this system has no way to tell, or to choose.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise UsageError("CPUs can be chosen on Linux only", hint="leave out the option")
    if not _allowed:
        _allowed.append(frozenset(os.sched_getaffinity(0)))
    return _allowed[0]


def check_cpus(cpus: Collection[int]) -> None:
    """Refuse processors that do not exist, or that this process may not use.

    Raises:
        UsageError: there are such, or none at all.
    """
    allowed = allowed_cpus()
    if not cpus:
        raise UsageError("no CPU is named", hint=f"there are {list_of_cpus(allowed)}")
    if strange := set(cpus) - allowed:
        raise UsageError(
            f"this process can't run on CPU {list_of_cpus(strange)}",
            hint=f"it may use {list_of_cpus(allowed)}",
        )


def place_process(cpus: Collection[int] | None, *, strict: bool = False) -> None:
    """Let the calling thread, and all that it starts from now on, run on some processors only, and
    helpers of kernels that run already. Nothing is done if none are named, unless `strict`.

    Raises:
        UsageError: as of `check_cpus`.
    """
    global _placement
    if cpus is None and not strict:
        return
    cpus = allowed_cpus() if cpus is None else cpus
    check_cpus(cpus)
    _placement = Placement(tuple(sorted(cpus)), strict)
    os.sched_setaffinity(0, _placement.cpus)
    for thread, index in _helpers.copy().items():
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(thread, _placement.of_thread(index))


def place_caller() -> None:
    """Give the calling thread, which runs kernels, its one processor if the placement is strict."""
    if _placement.strict:
        os.sched_setaffinity(0, _placement.of_thread(0))


def place_helper(index: int) -> None:
    """Called by a helper of kernels, numbered from 1, when it starts."""
    _helpers[threading.get_native_id()] = index
    if _placement.cpus:
        os.sched_setaffinity(0, _placement.of_thread(index))
