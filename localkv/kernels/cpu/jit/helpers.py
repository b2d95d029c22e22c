"""What the threads of the CPU's pool run (see `thread_pool`): helpers, and who they help.

One word, `ENTRY`, says all: the number of the job (in bits 16 to 31), whether the job is closed,
and how many helpers are inside. A helper enters a job that is open and leaves when nothing is left
to take. The thread whose job it is works too, closes the job when nothing is left, and waits only
for helpers that are inside: one that could not get a core in time is not missed.
"""

from __future__ import annotations

from numba import cfunc, njit

from localkv.kernels.cpu.jit.helper_state import (
    ENTRY,
    JOB,
    LIMIT,
    SLEEPERS,
    STOP,
    WORKER,
)
from localkv.simd.atomic import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_or,
    compare_exchange,
    futex_wait,
    futex_wake,
    pause,
    yield_cpu,
)
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import call_address, get_i64, put_i64

INSIDE, CLOSED, JOB_NUMBER = 0x7FFF, 0x8000, 16
SPINS = 2000
"""Pauses before a helper sleeps: about 50 us, longer than from one layer's kernel to the next."""


@cfunc("void(int64, int64)")
def help_out(state: Address, number: Count) -> None:
    """Thread `number` (from 1 on): take part in jobs until `STOP` is set."""
    last = atomic_load(state, ENTRY) >> JOB_NUMBER
    spins = 0
    while True:
        entry = atomic_load(state, ENTRY)
        if entry >> JOB_NUMBER == last or entry & CLOSED:
            if atomic_load(state, STOP) != 0:
                return
            spins += 1
            if spins < SPINS:
                pause()
            else:
                atomic_add(state, SLEEPERS, 1)
                futex_wait(state, ENTRY, entry)
                atomic_add(state, SLEEPERS, -1)
        elif compare_exchange(state, ENTRY, entry, entry + 1):
            last = entry >> JOB_NUMBER
            spins = 0
            if number <= get_i64(state, LIMIT):
                call_address(get_i64(state, WORKER), (get_i64(state, JOB), number))
            atomic_add(state, ENTRY, -1)


@njit
def run_with_helpers(state: Address, worker: Address, job: Address, n_helpers: Count) -> None:
    """worker(job, 0), and worker(job, i) by those of helpers 1 to `n_helpers` that come in time."""
    number = (atomic_load(state, ENTRY) >> JOB_NUMBER) + 1 & 0xFFFF
    put_i64(state, WORKER, worker)
    put_i64(state, JOB, job)
    put_i64(state, LIMIT, n_helpers)
    atomic_exchange(state, ENTRY, number << JOB_NUMBER)
    if atomic_load(state, SLEEPERS) > 0:
        futex_wake(state, ENTRY, n_helpers)
    call_address(worker, (job, 0))
    atomic_or(state, ENTRY, CLOSED)
    spins = 0
    while atomic_load(state, ENTRY) & INSIDE:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            yield_cpu()


@cfunc("void(int64, int64, int64, int64)")
def run_helped(state: Address, worker: Address, job: Address, n_helpers: Count) -> None:
    """`run_with_helpers` for one job."""
    run_with_helpers(state, worker, job, n_helpers)


@cfunc("void(int64, int64, int64)")
def run_steps(state: Address, steps: Address, n_steps: Count) -> None:
    """Run workers one after the other: int64 [n_steps, 3] at `steps`, worker, job, helpers.

    The first item of a job is its counter, which starts at 0. Without a `state` nobody helps.
    """
    for i in range(n_steps):
        worker, job = get_i64(steps, 3 * i), get_i64(steps, 3 * i + 1)
        n_helpers = get_i64(steps, 3 * i + 2)
        put_i64(job, 0, 0)
        if state == 0 or n_helpers == 0:
            call_address(worker, (job, 0))
        else:
            run_with_helpers(state, worker, job, n_helpers)


@cfunc("void(int64)")
def stop_helpers(state: Address) -> None:
    atomic_exchange(state, STOP, 1)
    number = (atomic_load(state, ENTRY) >> JOB_NUMBER) + 1 & 0xFFFF
    atomic_exchange(state, ENTRY, number << JOB_NUMBER | CLOSED)
    futex_wake(state, ENTRY, 1 << 30)
