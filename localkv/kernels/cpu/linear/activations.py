"""The CPU's work between products: norms, gating, RoPE. Rows of float32, at addresses.

The items of each job are listed with its worker. A row's result does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from localkv.simd.arithmetic import (
    add,
    div,
    exp,
    f32x16,
    fma,
    maximum,
    mul,
    sub,
    sum_lanes,
    zero_f32,
)
from localkv.simd.memory import (
    get_f32,
    get_i64,
    load_f32,
    put_f32,
    store_f32,
    take_next,
)

PART = 1024
"""Values of a piece of work where rows do not matter."""


@njit
def norm_row(x: Any, n: int, weight: Any, eps: Any, out: Any) -> None:
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


@cfunc("void(int64, int64)", error_model="numpy")
def norm(job: Any, thread: Any) -> None:
    """RMSNorm of rows: counter, rows, values of a row, x, weight, address of eps, out."""
    n_rows, n = get_i64(job, 1), get_i64(job, 2)
    eps = get_f32(get_i64(job, 5), 0)
    while True:
        row = take_next(job)
        if row >= n_rows:
            break
        x, out = get_i64(job, 3) + 4 * row * n, get_i64(job, 6) + 4 * row * n
        norm_row(x, n, get_i64(job, 4), eps, out)


@njit
def centred_row(x: Any, n: int, out: Any) -> None:
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


@cfunc("void(int64, int64)", error_model="numpy")
def layer_norm(job: Any, thread: Any) -> None:
    """LayerNorm of rows: counter, rows, values of a row, x, weight, address of eps, out, bias or 0.

    `out` must not be `x`.
    """
    n_rows, n = get_i64(job, 1), get_i64(job, 2)
    eps, bias = get_f32(get_i64(job, 5), 0), get_i64(job, 7)
    while True:
        row = take_next(job)
        if row >= n_rows:
            break
        x, out = get_i64(job, 3) + 4 * row * n, get_i64(job, 6) + 4 * row * n
        centred_row(x, n, out)
        norm_row(out, n, get_i64(job, 4), eps, out)
        if bias:
            for i in range(n):
                put_f32(out, i, get_f32(out, i) + get_f32(bias, i))


@cfunc("void(int64, int64)", error_model="numpy")
def geglu(job: Any, thread: Any) -> None:
    """gate = gelu(gate) * up: counter, values (a multiple of 16), gate, up.

    The tanh form, as x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), since
    1 + tanh(u) is 2 / (1 + exp(-2 u)).
    """
    n, gate, up = get_i64(job, 1), get_i64(job, 2), get_i64(job, 3)
    one, lowest = f32x16(np.float32(1)), f32x16(np.float32(-88))  # exp(88) is finite
    linear, cubic = f32x16(np.float32(1.5957691216)), f32x16(np.float32(0.0713548163))
    while True:
        start = take_next(job) * PART
        if start >= n:
            break
        for at in range(start, min(start + PART, n), 16):
            x = load_f32(gate, at)
            twice_u = mul(x, fma(cubic, mul(x, x), linear))
            power = exp(sub(zero_f32(), maximum(twice_u, lowest)))
            store_f32(gate, at, mul(div(x, add(one, power)), load_f32(up, at)))


@cfunc("void(int64, int64)", error_model="numpy")
def swiglu(job: Any, thread: Any) -> None:
    """gate = silu(gate) * up: counter, values (a multiple of 16), gate, up."""
    n, gate, up = get_i64(job, 1), get_i64(job, 2), get_i64(job, 3)
    one, lowest = f32x16(np.float32(1)), f32x16(np.float32(-88))  # exp(88) is finite
    while True:
        start = take_next(job) * PART
        if start >= n:
            break
        for at in range(start, min(start + PART, n), 16):
            x = load_f32(gate, at)
            power = exp(sub(zero_f32(), maximum(x, lowest)))
            store_f32(gate, at, mul(div(x, add(one, power)), load_f32(up, at)))


@cfunc("void(int64, int64)", error_model="numpy")
def rope(job: Any, thread: Any) -> None:
    """Heads of tokens, in place: norm of a head, then RoPE.

    The items: counter, tokens, heads, head_dim, x, weight of the norm or 0, address of its eps,
    rotated pairs or 0, whether pairs are neighbours, cos, sin (float32 [tokens, pairs]).
    """
    n_tokens, n_heads, head_dim = get_i64(job, 1), get_i64(job, 2), get_i64(job, 3)
    weight, n_pairs, neighbours = get_i64(job, 5), get_i64(job, 7), get_i64(job, 8)
    apart = 1 if neighbours else n_pairs
    step = 2 if neighbours else 1
    while True:
        token = take_next(job)
        if token >= n_tokens:
            break
        cos, sin = get_i64(job, 9) + 4 * token * n_pairs, get_i64(job, 10) + 4 * token * n_pairs
        for head in range(n_heads):
            x = get_i64(job, 4) + 4 * (token * n_heads + head) * head_dim
            if weight:
                norm_row(x, head_dim, weight, get_f32(get_i64(job, 6), 0), x)
            for i in range(n_pairs):
                a, b = get_f32(x, step * i), get_f32(x, step * i + apart)
                c, s = get_f32(cos, i), get_f32(sin, i)
                put_f32(x, step * i, a * c - b * s)
                put_f32(x, step * i + apart, a * s + b * c)
