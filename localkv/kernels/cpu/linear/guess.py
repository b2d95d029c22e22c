"""The worker that takes the most probable token and prepares its evaluation, which is the same
chain again."""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.linear.jobs import IS_OVER, N_EVALUATED, N_GUESSED, GuessJob
from localkv.simd.arithmetic import add, exp, f32x16, max_lanes, maximum, sub, sum_lanes
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import call_address, get_f32, get_i64, load_f32, put_f32, put_i64, reader

read_guess_job = reader(GuessJob)


@njit
def largest(x: Address, n: Count) -> Count:
    """The index of the first of the largest of n floats; 0 where there is NaN."""
    most = get_f32(x, 0)
    if n >= 16:
        vector = load_f32(x, 0)
        for i in range(16, n // 16 * 16, 16):
            vector = maximum(vector, load_f32(x, i))
        most = max_lanes(vector)
    for i in range(n // 16 * 16, n):
        most = max(most, get_f32(x, i))
    for i in range(n):
        if get_f32(x, i) == most:
            return i
    return 0


@njit
def share(x: Address, n: Count, index: Count) -> np.float32:
    """Softmax of n floats at an index."""
    most = get_f32(x, index)
    mosts, sums = f32x16(most), f32x16(np.float32(0.0))
    for i in range(0, n // 16 * 16, 16):
        sums = add(sums, exp(sub(load_f32(x, i), mosts)))
    total = sum_lanes(sums)
    for i in range(n // 16 * 16, n):
        total += max_lanes(exp(sub(f32x16(get_f32(x, i)), mosts)))
    return np.float32(np.float32(1.0) / np.float32(total))


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    """A token was evaluated: what comes next (`GuessJob`)."""
    job = read_guess_job(address)
    n_evaluated = job.n_evaluated + 1
    put_i64(address, N_EVALUATED, n_evaluated)
    if n_evaluated < job.n_given:
        token = get_i64(job.given, n_evaluated)
    else:
        token = largest(job.logits, job.n_vocab)
        probability = share(job.logits, job.n_vocab, token)
        if probability < get_f32(job.p_min, 0):
            put_i64(address, IS_OVER, 1)
            return
        n_guessed = job.n_guessed + 1
        put_i64(job.tokens, job.n_guessed, token)
        put_f32(job.probabilities, job.n_guessed, probability)
        put_i64(address, N_GUESSED, n_guessed)
        level = 0
        for i in range(job.n_bounds):
            if get_f32(job.bounds, i) <= probability:
                level += 1
        likely = np.float32(get_f32(job.likely, 0) * get_f32(job.chances, level))
        put_f32(job.likely, 0, likely)
        if n_guessed == job.most or not likely > get_f32(job.least, n_guessed - 1):
            put_i64(address, IS_OVER, 1)
            return
    put_i64(job.row_item, 0, job.first_row + token * job.row_bytes)
    call_address(job.row_worker, (job.row_job, 0))
    for i in range(job.n_grow):
        item = get_i64(job.grow, i)
        put_i64(item, 0, get_i64(item, 0) + 1)
    for i in range(job.n_clear):
        memory = get_i64(job.clear, 2 * i)
        for word in range(get_i64(job.clear, 2 * i + 1)):
            put_i64(memory, word, 0)
    for i in range(job.n_turns):
        to, n = get_i64(job.turns, 3 * i), get_i64(job.turns, 3 * i + 2)
        source = get_i64(job.turns, 3 * i + 1) + 4 * n
        put_i64(job.turns, 3 * i + 1, source)
        for k in range(n):
            put_f32(to, k, get_f32(source, k))
