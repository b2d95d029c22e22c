"""Norms and RoPE of one row of float32, in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.simd.arithmetic import add, f32x16, fma, mul, sub, sum_lanes, zero_f32
from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, load_f32, put_f32, store_f32


@njit
def norm_row(x: Address, n: int, weight: Address, eps: Any, out: Address) -> None:
    """RMSNorm of n floats; `out` may be `x`."""
    total = zero_f32()
    for i in range(n // 16):
        v = load_f32(x, 16 * i)
        total = fma(v, v, total)
    squares = sum_lanes(total)
    for i in range(n // 16 * 16, n):
        squares += get_f32(x, i) * get_f32(x, i)
    factor = np.float32(1) / np.sqrt(squares / np.float32(n) + eps)
    factors = f32x16(factor)
    for i in range(n // 16):
        y = mul(load_f32(x, 16 * i), factors)
        store_f32(out, 16 * i, mul(y, load_f32(weight, 16 * i)))
    for i in range(n // 16 * 16, n):
        put_f32(out, i, get_f32(x, i) * factor * get_f32(weight, i))


@njit
def centred_row(x: Address, n: int, out: Address) -> None:
    """n floats less their mean; `out` may be `x`."""
    total = zero_f32()
    for i in range(n // 16):
        total = add(total, load_f32(x, 16 * i))
    mean = sum_lanes(total)
    for i in range(n // 16 * 16, n):
        mean += get_f32(x, i)
    mean = mean / np.float32(n)
    means = f32x16(mean)
    for i in range(n // 16):
        store_f32(out, 16 * i, sub(load_f32(x, 16 * i), means))
    for i in range(n // 16 * 16, n):
        put_f32(out, i, get_f32(x, i) - mean)


@njit
def turn_row(x: Address, n_pairs: Count, neighbours: Count, cos: Address, sin: Address) -> None:
    """Turn pairs of channels in place: neighbours, or channels `n_pairs` apart."""
    apart = 1 if neighbours else n_pairs
    step = 2 if neighbours else 1
    for i in range(n_pairs):
        a, b = get_f32(x, step * i), get_f32(x, step * i + apart)
        c, s = get_f32(cos, i), get_f32(sin, i)
        put_f32(x, step * i, a * c - b * s)
        put_f32(x, step * i + apart, a * s + b * c)
