"""What the threads of the CPU's pool run (see `thread_pool`): helpers, and who they help.

One word, `ENTRY`, says all. From its lowest bit on: how many helpers are inside, whether the job is
closed, the job's number, how many helpers have entered, and how many may. A helper enters a job
that is open and leaves when nothing is left to take. The thread whose job it is works too, and
closes the job when nothing is left. It waits only for helpers that are inside: one that could not
get a core in time is not missed.

A helper that lost its core inside is missed. Where another program wants that core all the time,
the system takes it from one and gives it to the other every few milliseconds. Each time a job waits
for a helper that does not run. So the time is counted that was lost by waiting for longer than
one's own work took. If it is much, jobs get one helper fewer for a while, then twice as many fewer
if that is not enough. The while is twice as long when it soon happens again.
"""

from __future__ import annotations

from numba import cfunc, njit

from localkv.kernels.cpu.jit.helper_state import (
    BEGAN,
    ENTRY,
    FEWER,
    HELD,
    JOB,
    LEAST_HELD,
    LOST,
    MOST_HELD,
    SLEEPERS,
    SPINS,
    STOP,
    UNTIL,
    WINDOW,
    WORKER,
)
from localkv.simd.atomic import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_or,
    clock_ns,
    compare_exchange,
    futex_wait,
    futex_wake,
    pause,
    yield_cpu,
)
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import call_address, get_i64, put_i64

INSIDE, CLOSED, NUMBER, NUMBER_MASK, ENTERED, LIMIT = 0x7FFF, 0x8000, 16, 0xFFFF, 32, 48
ONE_MORE = (1 << ENTERED) + 1
WAKES = 2
"""Sleepers that somebody wakes; each of them wakes as many, if there is work. To wake one takes a
microsecond or more, and who wakes them all would be late at its own work."""


@njit
def wake(state: Address, n: Count) -> None:
    """Wake as many helpers, if some sleep."""
    if atomic_load(state, SLEEPERS) > 0:
        futex_wake(state, ENTRY, n)


@cfunc("void(int64)")
def help_out(state: Address) -> None:
    """Take part in jobs until `STOP` is set."""
    last, spins = -1, 0
    while True:
        entry = atomic_load(state, ENTRY)
        number = entry >> NUMBER & NUMBER_MASK
        index = (entry >> ENTERED & NUMBER_MASK) + 1
        if number == last or entry & CLOSED or index > entry >> LIMIT:
            if atomic_load(state, STOP) != 0:
                return
            spins += 1
            if spins < get_i64(state, SPINS):
                pause()
            else:
                atomic_add(state, SLEEPERS, 1)
                futex_wait(state, ENTRY, entry)
                atomic_add(state, SLEEPERS, -1)
        elif compare_exchange(state, ENTRY, entry, entry + ONE_MORE):
            last = number
            if spins >= get_i64(state, SPINS) and index < entry >> LIMIT:
                wake(state, WAKES)
            spins = 0
            call_address(get_i64(state, WORKER), (get_i64(state, JOB), index))
            atomic_add(state, ENTRY, -1)


@njit
def helpers_now(state: Address, n_helpers: Count, now: Count) -> Count:
    """How many of `n_helpers` a job gets; one more when the time of fewer is over."""
    fewer = get_i64(state, FEWER)
    if fewer > 0 and now > get_i64(state, UNTIL):
        fewer -= 1
        put_i64(state, FEWER, fewer)
        put_i64(state, UNTIL, now + get_i64(state, HELD))
    return n_helpers - fewer


@njit
def review(state: Address, n_helpers: Count, worked: Count, waited: Count, now: Count) -> None:
    """After a long wait: do with fewer helpers if time was lost, more than a third of it.

    Pieces of work are of about one size, and who waits has done one at least.
    """
    if waited > worked:
        put_i64(state, LOST, get_i64(state, LOST) + waited)
    passed = now - get_i64(state, BEGAN)
    if passed < get_i64(state, WINDOW):
        return
    if 3 * get_i64(state, LOST) > passed:
        held = get_i64(state, LEAST_HELD)
        if now < get_i64(state, UNTIL):
            held = min(2 * get_i64(state, HELD), get_i64(state, MOST_HELD))
        put_i64(state, FEWER, min(n_helpers, 2 * get_i64(state, FEWER) + 1))
        put_i64(state, HELD, held)
        put_i64(state, UNTIL, now + held)
    put_i64(state, BEGAN, now)
    put_i64(state, LOST, 0)


@njit
def run_with_helpers(state: Address, worker: Address, job: Address, n_helpers: Count) -> None:
    """worker(job, 0), and worker(job, i) by the ith helper to come in time, up to `n_helpers`."""
    begun = clock_ns()
    n_now = helpers_now(state, n_helpers, begun)
    if n_now <= 0:
        call_address(worker, (job, 0))
        return
    number = (atomic_load(state, ENTRY) >> NUMBER) + 1 & NUMBER_MASK
    put_i64(state, WORKER, worker)
    put_i64(state, JOB, job)
    atomic_exchange(state, ENTRY, n_now << LIMIT | number << NUMBER)
    wake(state, min(n_now, WAKES))
    call_address(worker, (job, 0))
    atomic_or(state, ENTRY, CLOSED)
    if not atomic_load(state, ENTRY) & INSIDE:
        return
    ended, spins = clock_ns(), 0
    while atomic_load(state, ENTRY) & INSIDE:
        spins += 1
        if spins < get_i64(state, SPINS):
            pause()
        else:
            yield_cpu()
    if spins >= get_i64(state, SPINS):
        now = clock_ns()
        review(state, n_helpers, ended - begun, now - ended, now)


@cfunc("void(int64, int64, int64, int64)")
def run_helped(state: Address, worker: Address, job: Address, n_helpers: Count) -> None:
    """`run_with_helpers` for one job."""
    run_with_helpers(state, worker, job, n_helpers)


@njit
def run_each(state: Address, steps: Address, n_steps: Count) -> None:
    """Run what `run_steps` runs."""
    for i in range(n_steps):
        worker, job = get_i64(steps, 3 * i), get_i64(steps, 3 * i + 1)
        n_helpers = get_i64(steps, 3 * i + 2)
        put_i64(job, 0, 0)
        if state == 0 or n_helpers == 0:
            call_address(worker, (job, 0))
        else:
            run_with_helpers(state, worker, job, n_helpers)


@cfunc("void(int64, int64, int64)")
def run_steps(state: Address, steps: Address, n_steps: Count) -> None:
    """Run workers one after the other: int64 [n_steps, 3] at `steps`, worker, job, helpers.

    The first item of a job is its counter, which starts at 0. Without a `state` nobody helps.
    """
    run_each(state, steps, n_steps)


@cfunc("void(int64, int64, int64, int64)")
def run_rounds(state: Address, steps: Address, n_steps: Count, is_over: Address) -> None:
    """`run_steps` again and again, until a worker has set the item `is_over`."""
    while get_i64(is_over, 0) == 0:
        run_each(state, steps, n_steps)


@cfunc("void(int64, int64)")
def time_pauses(state: Address, n: Count) -> None:
    """How many nanoseconds `n` pauses take, as in the loops above, as `SPINS`."""
    begun = clock_ns()
    for _ in range(n):
        if atomic_load(state, ENTRY) != 0:
            break
        pause()
    put_i64(state, SPINS, clock_ns() - begun)


@cfunc("void(int64)")
def stop_helpers(state: Address) -> None:
    atomic_exchange(state, STOP, 1)
    number = (atomic_load(state, ENTRY) >> NUMBER) + 1 & NUMBER_MASK
    atomic_exchange(state, ENTRY, number << NUMBER | CLOSED)
    futex_wake(state, ENTRY, 1 << 30)
