"""Online softmax (Milakov & Gimelshein 2018) of one row, for the CPU's attention workers.

exp(logit) is computed as 2^(log2(e) logit - reference), with one rounding in the exponent. What was
summed before is rescaled only when a logit exceeds the row's reference by so much that it has to be
(FlashAttention-4's rule); any reference gives the same quotient.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from localkv.simd import LANES
from localkv.simd.arithmetic import (
    add,
    any_above,
    exp2,
    f32x16,
    fma,
    lanes_below,
    max_lanes,
    maximum,
    mul,
    select,
    sum_lanes,
    tanh,
    zero_f32,
)
from localkv.simd.kinds import Address, Float
from localkv.simd.memory import get_f32, load_f32, put_f32, store_f32

HIDDEN = np.float32(-1e30)
"""The logit of a token that a row doesn't see; minus infinity would make NaN of differences."""
START = np.float32(-1e20)
"""The reference of a row that saw nothing: above HIDDEN, below all logits."""
HEADROOM = np.float32(8)
"""Powers of two by which a logit may exceed the reference."""
ZERO, ONE = np.float32(0), np.float32(1)
LOG2_E, LN_2 = np.float32(math.log2(math.e)), np.float32(math.log(2))


LEAST_POWER = np.float32(-126)
"""C's function takes its time over powers of two below."""


@njit
def power_of_two(x: Float) -> Float:
    """2^x, or 2^-126 if that is more: of what is faded so far nothing is left in a sum."""
    return np.exp2(max(x, LEAST_POWER))


@njit
def query_factor(softmax_scale: Float, softcap: Float) -> Float:
    """What queries are multiplied with: q . k is then the logit, or what `cap_logits` takes."""
    if softcap > ZERO:
        return softmax_scale / softcap
    return softmax_scale


@njit
def cap_logits(logits: Address, n: int, softcap: Float) -> None:
    """x -> cap tanh(x)."""
    for t in range(0, n, LANES):
        store_f32(logits, t, mul(tanh(load_f32(logits, t)), f32x16(softcap)))


@njit
def hide(logits: Address, n: int, first: int, end: int) -> None:
    """Hide all but tokens `first` to `end` - 1; what is hidden may be NaN."""
    for t in range(0, n, LANES):
        x = select(lanes_below(end - t), load_f32(logits, t), f32x16(HIDDEN))
        x = select(lanes_below(first - t), f32x16(HIDDEN), x)
        store_f32(logits, t, x)


@njit
def fade(row: Address, n: int, factor: Float) -> None:
    """Multiply `n` floats."""
    for i in range(0, n, LANES):
        store_f32(row, i, mul(load_f32(row, i), f32x16(factor)))


@njit
def clear_row(out: Address, head_dim: int, reference: Address, total: Address) -> None:
    """The state of a row before its first token: output, reference, sums in 16 lanes."""
    for c in range(0, head_dim, LANES):
        store_f32(out, c, zero_f32())
    put_f32(reference, 0, START)
    store_f32(total, 0, zero_f32())


@njit
def soften(
    logits: Address,
    n: int,
    first: int,
    end: int,
    out: Address,
    head_dim: int,
    reference: Address,
    total: Address,
) -> None:
    """Replace a row's `n` logits (a multiple of 16) by exp(logit) / 2^reference.

    All but tokens `first` to `end` - 1 become 0. `out`, `reference` and `total` are the
    addresses of the row's state, see `clear_row`. A NaN among the others makes `total` NaN for
    good, whatever becomes of the reference.
    """
    if first > 0 or end < n:
        hide(logits, n, first, end)
    largest = load_f32(logits, 0)
    for t in range(LANES, n, LANES):
        largest = maximum(load_f32(logits, t), largest)
    old = get_f32(reference, 0)
    if any_above(largest, f32x16((old + HEADROOM) * LN_2)):
        new = max_lanes(largest) * LOG2_E
        factor = power_of_two(old - new)
        fade(out, head_dim, factor)
        fade(total, LANES, factor)
        put_f32(reference, 0, new)
    shift = f32x16(-get_f32(reference, 0))
    sums = load_f32(total, 0)
    for t in range(0, n, LANES):
        p = exp2(fma(load_f32(logits, t), f32x16(LOG2_E), shift))
        store_f32(logits, t, p)
        sums = add(sums, p)
    store_f32(total, 0, sums)


@njit
def row_sum(total: Address) -> Float:
    return sum_lanes(load_f32(total, 0))


@njit
def log_sum_exp(reference: Float, total: Float) -> Float:
    """The natural logarithm of the sum of exp(logit); minus infinity of none, NaN of NaN."""
    if total != ZERO:
        return (reference + np.log2(total)) * LN_2
    return np.float32(-np.inf)
