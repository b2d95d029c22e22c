"""Routing to experts, in compiled code: `route` of `kernels/moe.py`, one kind of shares.

A token's choice does not depend on other tokens. NaN comes after all numbers, as NumPy sorts it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.kernels.cpu.jit.parameters import parameter
from localkv.kernels.cpu.moe.jobs import RouteJob, whole_lines
from localkv.simd.arithmetic import (
    add,
    div,
    exp2,
    f32x16,
    fma,
    if_positive,
    log1p,
    max_lanes,
    maximum,
    mul,
    sqrt,
    sub,
    sum_lanes,
    zero_f32,
)
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import (
    get_f32,
    get_i64,
    load_f32,
    put_f32,
    put_i64,
    reader,
    store_f32,
    take_next,
)

read_route_job = reader(RouteJob)

GATING = parameter("GATING", "softmax")
MIN_WEIGHT_SUM = np.float32(2.0**-14)
"""See `kernels/moe.py`."""
LARGE = np.float32(20)
"""From here on softplus is the identity."""
LOWEST = np.float32(-3e38)
"""What completes a vector: its exponential is 0."""
LOG2_E, LN_2 = np.float32(1.44269504089), np.float32(0.69314718056)
ZERO, ONE = np.float32(0), np.float32(1)
whole = njit(whole_lines)


@njit
def exponential(x: Any) -> Any:
    """exp(x) for x <= 80, NaN of NaN: 2^t (1 + r ln 2), where t + r = x / ln 2."""
    x = maximum(f32x16(np.float32(-200)), x)
    t = mul(x, f32x16(LOG2_E))
    rest = fma(x, f32x16(LOG2_E), sub(zero_f32(), t))
    power = exp2(t)
    return fma(power, mul(rest, f32x16(LN_2)), power)


@njit
def softmax(x: Address, n: int) -> None:
    """Softmax of n floats in place; what completes their last vector becomes 0."""
    end = (n + 15) // 16 * 16
    for i in range(n, end):
        put_f32(x, i, LOWEST)
    top = load_f32(x, 0)
    for i in range(16, end, 16):
        top = maximum(load_f32(x, i), top)
    most = f32x16(max_lanes(top))
    total = zero_f32()
    for i in range(0, end, 16):
        power = exponential(sub(load_f32(x, i), most))
        store_f32(x, i, power)
        total = add(total, power)
    factors = f32x16(sum_lanes(total))
    for i in range(0, end, 16):
        store_f32(x, i, div(load_f32(x, i), factors))


@njit
def share(x: Any) -> Any:
    """One expert's share, where it does not depend on the others."""
    if GATING == "sigmoid":
        power = exponential(sub(zero_f32(), maximum(f32x16(np.float32(-80)), x)))
        return div(f32x16(ONE), add(f32x16(ONE), power))
    if GATING == "sqrt_softplus":
        excess = sub(x, f32x16(LARGE))
        small = sub(x, maximum(zero_f32(), excess))  # at most LARGE, NaN of NaN
        return sqrt(if_positive(excess, x, log1p(exponential(small))))
    return x


@njit
def comes_before(x: Any, y: Any) -> bool:
    """Whether x is larger: neither of equal ones is."""
    return x > y or (y != y and x == x)


@njit
def take_best(best: Address, ids: Address, n: int, most: int, value: Any, number: int) -> int:
    """Keep the `most` largest values and their numbers, of equal ones the first.

    Returns:
        how many there are now, of `n` before.
    """
    if n == most:
        if not comes_before(value, get_f32(best, most - 1)):
            return n
        n -= 1
    at = n
    while at > 0 and comes_before(value, get_f32(best, at - 1)):
        put_f32(best, at, get_f32(best, at - 1))
        put_i64(ids, at, get_i64(ids, at - 1))
        at -= 1
    put_f32(best, at, value)
    put_i64(ids, at, number)
    return n + 1


@njit
def keep_best_groups(job: Any, ranks: Address, best: Address, groups: Address) -> None:
    """Ranks outside of the best groups become minus infinity; see `of_best_groups`."""
    each, found = job.n_experts // job.n_groups, 0
    for group in range(job.n_groups):
        first = second = np.float32(-np.inf)
        for i in range(group * each, group * each + each):
            value = get_f32(ranks, i)
            if i == group * each:
                first = value
            elif i == group * each + 1:
                second = value
                if comes_before(second, first):
                    first, second = second, first
            elif comes_before(value, first):
                first, second = value, first
            elif comes_before(value, second):
                second = value
        rating = first + second if each > 1 else first
        found = take_best(best, groups, found, job.n_groups_used, rating, group)
    for group in range(job.n_groups):
        is_used = False
        for i in range(found):
            is_used = is_used or get_i64(groups, i) == group
        if not is_used:
            for i in range(group * each, group * each + each):
                put_f32(ranks, i, np.float32(-np.inf))


@njit
def put_by_expert(experts: Address, weights: Address, n: int) -> None:
    """Put a token's experts in the order of their numbers, in which their outputs are added up."""
    for i in range(1, n):
        expert, weight, at = get_i64(experts, i), get_f32(weights, i), i
        while at > 0 and get_i64(experts, at - 1) > expert:
            put_i64(experts, at, get_i64(experts, at - 1))
            put_f32(weights, at, get_f32(weights, at - 1))
            at -= 1
        put_i64(experts, at, expert)
        put_f32(weights, at, weight)


@njit
def put_weights(job: Any, shares: Address, chosen: Address, experts: Address, out: Address) -> None:
    """The weights of the chosen experts; `chosen` is memory for whole vectors of them."""
    for i in range(job.n_used):
        put_f32(chosen, i, get_f32(shares, get_i64(experts, i)))
    if GATING == "softmax_of_chosen":
        softmax(chosen, job.n_used)
    total = ZERO
    for i in range(job.n_used):
        total += get_f32(chosen, i)
    if total < MIN_WEIGHT_SUM:
        total = MIN_WEIGHT_SUM
    scale = get_f32(job.scale, 0)
    for i in range(job.n_used):
        weight = get_f32(chosen, i)
        if job.renormalise:
            weight = weight / total
        put_f32(out, i, weight * scale)


@cfunc("void(int64, int64)", error_model="numpy")
def route(address: Address, thread: Count) -> None:
    """The best few experts of each token, and their weights (`RouteJob`)."""
    job = read_route_job(address)
    n, n_used = job.n_experts, job.n_used
    shares = job.scratch + thread * job.thread_bytes
    size = whole(4 * n)
    ranks, best, groups = shares + size, shares + 2 * size, shares + 3 * size
    while True:
        token = take_next(address)
        if token >= job.n_tokens:
            break
        logits = job.logits + 4 * token * n
        experts, weights = job.experts + 8 * token * n_used, job.weights + 4 * token * n_used
        for i in range(n):
            put_f32(shares, i, get_f32(logits, i))
        if GATING == "softmax":
            softmax(shares, n)
        else:
            for i in range(n, size // 4):
                put_f32(shares, i, ZERO)
            for i in range(0, n, 16):
                store_f32(shares, i, share(load_f32(shares, i)))
        for i in range(n):
            rank = get_f32(logits, i) if job.ranks_logits else get_f32(shares, i)
            if job.bias:
                rank += get_f32(job.bias, i)
            put_f32(ranks, i, rank)
        if job.n_groups > 1:
            keep_best_groups(job, ranks, best, groups)
        found = 0
        for i in range(n):
            found = take_best(best, experts, found, n_used, get_f32(ranks, i), i)
        put_weights(job, shares, best, experts, weights)
        put_by_expert(experts, weights, n_used)
