"""Threads for the CPU's kernels, which nobody waits for if another program has their core.

A *worker* is a C function of two int64. The first is the address of a job, which is an array of
int64 of the worker's own making. The second is the number of the thread, 0 to n - 1. Workers take
pieces of the job one after the other from a counter in it (`simd.memory.take_next`), so any number
of threads will do.

OpenMP's threads all have to arrive at the end of a parallel region. Where another program runs on
one core, that takes several milliseconds (a time slice), many times as long as the work itself.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
from array import array
from collections.abc import Callable

import numpy as np

from localkv.kernels.cpu.jit.helper_state import LEAST_HELD, MOST_HELD, SPINS, STATE_WORDS, WINDOW
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.simd.cpu_features import HAS_FUTEX
from localkv.system.threads import place_helper
from localkv.system.turns import is_on_stack

HELPERS = KernelSource("jit/helpers")

SPIN_NS = 50_000
"""How long a helper spins before it sleeps: longer than from one layer's kernels to the next."""
PATIENCE_NS = {WINDOW: 10_000_000, LEAST_HELD: 20_000_000, MOST_HELD: 400_000_000}
"""How long time is counted that is lost by waiting for helpers that have no core, and how long jobs
get fewer of them then, at first and at most (see `helpers`)."""
PAUSES = 500
"""That are timed: they take 1 to 50 ns each, depending on the processor."""


@functools.cache
def _callable(name: str, n_arguments: int) -> Callable[..., None]:
    """A function of `helpers` that takes integers; it runs without the interpreter's lock."""
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * n_arguments)
    function: Callable[..., None] = kind(specialized(HELPERS)[name])
    return function


_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


@functools.cache
def worker_call(worker: int) -> Callable[[int, int], None]:
    """A worker as a function of a job and the number of the thread; to make one takes time."""
    return _WORKER(worker)


def run_alone(worker: int, job: int) -> None:
    """Run a worker on this thread only."""
    worker_call(worker)(job, 0)


def _help(index: int, help_out: Callable[[int], None], state: int) -> None:
    place_helper(index)
    help_out(state)


class ThreadPool:
    """Helpers that are started when they are first asked for, and stopped at exit.

    All models of a process share them.
    """

    def __init__(self) -> None:
        self.users = dict[int, tuple[int]]()
        self.threads = list[threading.Thread]()
        self.memory: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
        self.state = 0

    def run(self, worker: int, job: int, n_threads: int) -> None:
        """Run a worker on this thread and on up to n_threads - 1 helpers, until the job is done.

        While another thread uses the helpers, a job gets none.
        """
        mine = (threading.get_ident(),)
        try:
            if n_threads > 1 and self._is_given_to(mine):
                self._start(n_threads - 1)
                _callable("run_helped", 4)(self.state, worker, job, n_threads - 1)
            else:
                run_alone(worker, job)
        finally:
            self._give_back(mine)

    def run_steps(self, steps: int, n_steps: int, n_threads: int, until: int = 0) -> None:
        """Run workers one after the other with one call (see `helpers.run_steps`), or again and
        again until the item at this address is set (`helpers.run_rounds`)."""
        last = (until,) if until else ()
        run = _callable("run_rounds" if until else "run_steps", 3 + len(last))
        mine = (threading.get_ident(),)
        try:
            if n_threads > 1 and self._is_given_to(mine):
                self._start(n_threads - 1)
                run(self.state, steps, n_steps, *last)
            else:
                run(0, steps, n_steps, *last)
        finally:
            self._give_back(mine)

    def run_loop(self, worker: int, job: int, n_threads: int) -> None:
        """Run a job on Numba's threads, which are no more than one job's at a time, too."""
        import numba

        from localkv.kernels.cpu.runtime.parallel_loop import run_workers

        mine = (threading.get_ident(),)
        try:
            if self._is_given_to(mine):
                numba.set_num_threads(min(n_threads, numba.config.NUMBA_NUM_THREADS))
                run_workers()(worker, job, n_threads)
            else:
                run_alone(worker, job)
        finally:
            self._give_back(mine)

    def _is_given_to(self, mine: tuple[int]) -> bool:
        """Take the helpers, unless another thread has them.

        No lock: an exception between taking it and `try` would leave it locked. What a thread has
        left so is its own when it comes again, unless it is still at it (in a signal handler now).
        """
        user = self.users.setdefault(0, mine)
        if user is mine:
            return True
        if user[0] != mine[0] or is_on_stack(user[0], "mine", user):
            return False
        self.users[0] = mine
        return True

    def _give_back(self, mine: tuple[int]) -> None:
        if self.users.get(0) is mine:
            self.users.clear()

    def _start(self, n_helpers: int) -> None:
        if len(self.threads) >= n_helpers:
            return
        if self.memory is None:
            memory = np.zeros(STATE_WORDS + 8, np.int64)
            self.state = (memory.ctypes.data + 63) // 64 * 64
            self.memory = memory
            self._learn_patience()
            atexit.register(self._stop)
        while len(self.threads) < n_helpers:
            args = (len(self.threads) + 1, _callable("help_out", 1), self.state)
            thread = threading.Thread(target=_help, args=args, daemon=True)
            self.threads.append(thread)
            thread.start()

    def _learn_patience(self) -> None:
        time_pauses = _callable("time_pauses", 2)
        shortest = SPIN_NS * PAUSES
        for _ in range(3):
            time_pauses(self.state, PAUSES)
            shortest = min(shortest, self.word(SPINS))
        self.set_word(SPINS, SPIN_NS * PAUSES // max(1, shortest))
        for word, nanoseconds in PATIENCE_NS.items():
            self.set_word(word, nanoseconds)

    def word(self, index: int) -> int:
        """A word of the state."""
        return ctypes.c_int64.from_address(self.state + 8 * index).value

    def set_word(self, index: int, value: int) -> None:
        ctypes.c_int64.from_address(self.state + 8 * index).value = value

    def _stop(self) -> None:
        _callable("stop_helpers", 1)(self.state)
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()


_POOL = ThreadPool()


def run_worker(worker: int, job: int, n_threads: int) -> None:
    """Run a worker, known by its address, on some threads; it returns when the job is done."""
    if n_threads == 1:
        run_alone(worker, job)
    elif HAS_FUTEX:
        _POOL.run(worker, job, n_threads)
    else:
        _POOL.run_loop(worker, job, n_threads)


def run_steps(steps: array[int], n_threads: int) -> None:
    """Run workers one after the other: worker, job and how many threads help, for each step, fewer
    than `n_threads`.

    The first item of a job is its counter, which becomes 0.
    """
    n_steps = len(steps) // 3
    if HAS_FUTEX or n_threads == 1:
        _POOL.run_steps(steps.buffer_info()[0], n_steps, n_threads)
        return
    for i in range(n_steps):
        one = steps[3 * i : 3 * i + 2] + array("q", [0])
        if steps[3 * i + 2] == 0:
            _POOL.run_steps(one.buffer_info()[0], 1, 1)
        else:
            ctypes.c_int64.from_address(one[1]).value = 0
            _POOL.run_loop(one[0], one[1], 1 + steps[3 * i + 2])


def run_rounds(steps: array[int], n_threads: int, is_over: int) -> None:
    """`run_steps` again and again, until a worker has set the item at this address."""
    n_steps = len(steps) // 3
    if HAS_FUTEX or n_threads == 1:
        _POOL.run_steps(steps.buffer_info()[0], n_steps, n_threads, is_over)
        return
    while not ctypes.c_int64.from_address(is_over).value:
        run_steps(steps, n_threads)
