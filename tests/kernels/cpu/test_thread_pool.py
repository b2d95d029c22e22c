"""The pool of threads: who takes part in a job, and when helpers are not asked."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from localkv.kernels.cpu.jit.helper_state import FEWER, HELD, SPINS, UNTIL, WINDOW
from localkv.kernels.cpu.runtime.thread_pool import PATIENCE_NS, SPIN_NS, ThreadPool
from localkv.simd.cpu_features import HAS_FUTEX
from support.waiting import wait_for

pytestmark = pytest.mark.skipif(not HAS_FUTEX, reason="threads are Numba's")
WORKER = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
MS = 1_000_000


class Pool:
    """A pool whose workers are Python functions of the thread's number."""

    def __init__(self) -> None:
        self.pool = ThreadPool()

    def run(self, work: Callable[[int], object], n_threads: int) -> None:
        worker = WORKER(lambda job, number: work(number))
        self.pool.run(ctypes.cast(worker, ctypes.c_void_p).value or 0, 0, n_threads)

    def now(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    pool.run(lambda number: None, 2)
    yield pool
    pool.pool._stop()
    assert not any(thread.is_alive() for thread in pool.pool.threads)


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8, 64])
def test_every_piece_is_taken_once_by_threads_of_different_numbers(
    pool: Pool, n_threads: int
) -> None:
    for n_pieces in (0, 1, 2, 100):
        pieces, taken, inside = list(range(n_pieces)), list[int](), list[int]()

        def work(number: int) -> None:
            inside.append(number)  # noqa: B023
            while pieces:  # noqa: B023
                taken.append(pieces.pop())  # noqa: B023

        pool.run(work, n_threads)
        assert sorted(taken) == list(range(n_pieces))
        assert len(set(inside)) == len(inside)
        assert set(inside) <= set(range(n_threads))


@pytest.mark.parametrize("n_threads", [2, 5])
def test_sleepers_wake_one_another(pool: Pool, n_threads: int) -> None:
    """All that a job may have come, whichever of many they are; no others do."""
    pool.run(lambda number: None, 12)
    time.sleep(0.05)  # they sleep
    inside, all_here = list[int](), threading.Event()

    def work(number: int) -> None:
        inside.append(number)
        if len(inside) == n_threads:
            all_here.set()
        assert all_here.wait(30)

    pool.run(work, n_threads)
    assert sorted(inside) == list(range(n_threads))


def test_many_jobs_of_any_size(pool: Pool) -> None:
    counts = [0] * 64

    def work(number: int) -> None:
        counts[number] += 1

    for i in range(2000):
        pool.run(work, 1 + i * 7 % 9)
    assert counts[0] == 2000
    assert not any(counts[9:])


def test_helpers_spin_for_a_time_whatever_a_pause_takes(pool: Pool) -> None:
    pool.run(lambda number: None, 2)
    spins = pool.pool.word(SPINS)
    assert SPIN_NS / 100 < spins < SPIN_NS * 10  # a pause takes 0.1 to 100 ns


def lose(pool: Pool, n_threads: int, seconds: float, n_lost: int | None = None) -> None:
    """Jobs whose helpers lose their cores, `n_lost` of them, for a time."""
    started = threading.Barrier((n_threads if n_lost is None else n_lost + 1), timeout=30)
    end = time.monotonic() + seconds
    late = set(range(1, n_threads) if n_lost is None else range(1, n_lost + 1))

    def work(number: int) -> None:
        if number in late | {0} and not pool.pool.word(FEWER):
            started.wait()
        if number in late:
            time.sleep(0.004)

    while time.monotonic() < end and not pool.pool.word(FEWER):
        pool.run(work, n_threads)


def test_helpers_without_a_core_are_not_asked_for_a_while(pool: Pool) -> None:
    lose(pool, 2, 30)
    state = pool.pool
    assert state.word(FEWER) == 1
    assert state.word(HELD) == min(PATIENCE_NS.values()) * 2 == 20 * MS
    inside = list[int]()
    state.set_word(UNTIL, pool.now() + 60_000 * MS)
    for _ in range(20):
        pool.run(inside.append, 2)
        time.sleep(0.001)
    assert set(inside) == {0}
    state.set_word(UNTIL, pool.now() - 1)
    pool.run(inside.append, 2)
    assert state.word(FEWER) == 0
    assert state.word(UNTIL) > pool.now()


def test_who_is_soon_without_a_core_again_is_not_asked_for_longer(pool: Pool) -> None:
    lose(pool, 2, 30)
    state = pool.pool
    for wanted in (40, 80, 160, 320, 400, 400):
        state.set_word(UNTIL, pool.now() - 1)
        pool.run(lambda number: None, 2)  # asked again
        assert state.word(FEWER) == 0
        state.set_word(UNTIL, pool.now() + 60_000 * MS)  # and soon
        lose(pool, 2, 30)
        assert state.word(HELD) == wanted * MS


def test_of_many_helpers_some_are_still_asked(pool: Pool) -> None:
    """One program takes a core; more helpers do without until no time is lost."""
    lose(pool, 8, 30, n_lost=1)
    state = pool.pool
    assert state.word(FEWER) == 1
    state.set_word(UNTIL, pool.now() + 60_000 * MS)
    state.set_word(WINDOW, 1 << 62)
    seen = set[int]()

    def look() -> bool:
        pool.run(lambda number: (seen.add(number), time.sleep(0.001)), 8)
        return seen == set(range(7))

    wait_for(look)
    assert seen == set(range(7))
