"""Sums over rows of logits for a comparison with another model's (`kernels/kept_sums.py`).

A row's exponentials stay in a core's cache until they are summed up. The job is these int64:

    next_row                  the row to take next
    n_rows, n                 rows, and logits of one
    logits                    float32 [n_rows, n]
    ids, shifted, starts      as `Kept` has them
    weights                   float32 [threads, n in whole vectors], scratch
    best                      int64 [n_rows]
    out                       float32 [n_rows, 9]: the largest logit; kept, kept_apart, rest and
                              rest_logs, each as two floats whose sum it is
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.simd import LANES
from localkv.simd.arithmetic import (
    add,
    at_least,
    exp,
    f32x16,
    first_lane,
    fma,
    max_lanes,
    maximum,
    sub,
    sum_lanes,
    zero_f32,
)
from localkv.simd.kinds import Address, Count, Float
from localkv.simd.memory import (
    get_f32,
    get_i32,
    get_i64,
    get_i64s,
    load_f32,
    put_f32,
    put_i64,
    store_f32,
    take_next,
)

ITEMS, RESULTS = 10, 9
FAR = np.float32(-200)
"""A logit whose exponential is 0."""
BLOCK = 1024
"""Values whose sum is made in float32."""


@njit
def largest_of(x: Address, n: Count) -> Float:
    """The largest of n floats."""
    whole = n - n % LANES
    most = get_f32(x, 0)
    if whole > 0:
        top = load_f32(x, 0)
        for i in range(LANES, whole, LANES):
            top = maximum(top, load_f32(x, i))
        most = max_lanes(top)
    for i in range(whole, n):
        most = max(most, get_f32(x, i))
    return most


@njit
def first_of(x: Address, n: Count, most: Float) -> int:
    """Where the first float is that is at least `most`; n if none is."""
    whole, level = n - n % LANES, f32x16(most)
    for i in range(0, whole, LANES):
        lane = first_lane(at_least(load_f32(x, i), level))
        if lane < LANES:
            return i + lane
    for i in range(whole, n):
        if get_f32(x, i) >= most:
            return i
    return n


@njit
def put_weights(x: Address, n: Count, most: Float, weights: Address) -> None:
    """weights = exp(x - most), and 0 up to a whole vector."""
    whole, level = n - n % LANES, f32x16(most)
    for i in range(0, whole, LANES):
        store_f32(weights, i, exp(sub(load_f32(x, i), level)))
    if whole < n:
        for i in range(whole, whole + LANES):
            put_f32(weights, i, get_f32(x, i) - most if i < n else FAR)
        store_f32(weights, whole, exp(load_f32(weights, whole)))


@njit
def take_kept(
    x: Address, most: Float, weights: Address, ids: Address, shifted: Address, first: int, end: int
) -> Any:
    """Sums of kept tokens, whose weights become 0."""
    total, apart = 0.0, 0.0
    for k in range(first, end):
        token = get_i32(ids, k)
        weight = np.float64(get_f32(weights, token))
        difference = np.float64(get_f32(x, token) - most) - np.float64(get_f32(shifted, k))
        total += weight
        apart += weight * difference
        put_f32(weights, token, np.float32(0))
    return total, apart


@njit
def rest_of(x: Address, n: Count, most: Float, weights: Address) -> Any:
    """Sums of all weights, and of their products with x - most."""
    whole, level = n - n % LANES, f32x16(most)
    total, logs = 0.0, 0.0
    for start in range(0, whole, BLOCK):
        some, some_logs = zero_f32(), zero_f32()
        for i in range(start, min(whole, start + BLOCK), LANES):
            weight = load_f32(weights, i)
            some = add(some, weight)
            some_logs = fma(weight, sub(load_f32(x, i), level), some_logs)
        total += np.float64(sum_lanes(some))
        logs += np.float64(sum_lanes(some_logs))
    for i in range(whole, n):
        weight_1 = np.float64(get_f32(weights, i))
        total += weight_1
        logs += weight_1 * np.float64(get_f32(x, i) - most)
    return total, logs


@njit
def put_sum(out: Address, index: int, total: Float) -> None:
    """A float64 as two floats."""
    high = np.float32(total)
    put_f32(out, index, high)
    put_f32(out, index + 1, np.float32(total - np.float64(high)))


@cfunc("void(int64, int64)", error_model="numpy")
def worker(address: Address, thread: Count) -> None:
    """Take row after row."""
    items = get_i64s(address, ITEMS)
    n_rows, n, logits, ids, shifted, starts = items[1:7]
    weights = items[7] + thread * ((n + LANES - 1) // LANES * LANES) * 4
    while True:
        row = take_next(address)
        if row >= n_rows:
            break
        x, out = logits + row * n * 4, items[9] + row * RESULTS * 4
        most = largest_of(x, n)
        put_i64(items[8], row, first_of(x, n, most))
        put_weights(x, n, most, weights)
        first, end = get_i64(starts, row), get_i64(starts, row + 1)
        kept, apart = take_kept(x, most, weights, ids, shifted, first, end)
        rest, logs = rest_of(x, n, most, weights)
        put_f32(out, 0, most)
        put_sum(out, 1, kept)
        put_sum(out, 3, apart)
        put_sum(out, 5, rest)
        put_sum(out, 7, logs)
