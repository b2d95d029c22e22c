"""Online softmax (Milakov & Gimelshein 2018) of one row, for the CPU's attention workers.

A window or a soft cap on the logits would go into `soften`, where the logits are masked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.simd.arithmetic import (
    add,
    exp,
    f32x16,
    lanes_below,
    max_lanes,
    maximum,
    mul,
    select,
    sub,
    sum_lanes,
    zero_f32,
)
from localkv.simd.memory import load_f32, store_f32
from localkv.simd.vector import LANES

LOWEST = np.float32(-1e30)
"""Stands for minus infinity, which would make NaN of differences."""
ZERO, ONE = np.float32(0), np.float32(1)


@njit
def soften(logits: Any, n_tokens: int, n_visible: int, top: Any) -> Any:
    """Replace a row's logits by exp(logit - new top), by 0 from `n_visible` on.

    Logits that are not visible may be NaN. `top` is the largest logit before.

    Returns:
        the new top, the factor by which what was summed before is to be faded, and the row's sum.
    """
    largest = f32x16(top)
    for t in range(0, n_tokens, LANES):
        x = select(lanes_below(n_visible - t), load_f32(logits, t), f32x16(LOWEST))
        largest = maximum(x, largest)
    new_top = max_lanes(largest)
    total = zero_f32()
    for t in range(0, n_tokens, LANES):
        p = exp(sub(load_f32(logits, t), f32x16(new_top)))
        p = select(lanes_below(n_visible - t), p, zero_f32())
        store_f32(logits, t, p)
        total = add(total, p)
    return new_top, np.exp(top - new_top), sum_lanes(total)


@njit
def fade(row: Any, n: int, factor: Any) -> None:
    """Multiply `n` floats."""
    if factor != ONE:
        for i in range(0, n, LANES):
            store_f32(row, i, mul(load_f32(row, i), f32x16(factor)))
