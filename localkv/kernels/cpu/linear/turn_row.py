"""RoPE of one head."""

from __future__ import annotations

from numba import njit

from localkv.simd.kinds import Address, Count
from localkv.simd.memory import get_f32, put_f32


@njit
def turn_row(x: Address, n_pairs: Count, neighbours: Count, cos: Address, sin: Address) -> None:
    """Turn pairs of channels in place: those beside each other, or `n_pairs` apart."""
    apart = 1 if neighbours else n_pairs
    step = 2 if neighbours else 1
    for i in range(n_pairs):
        a, b = get_f32(x, step * i), get_f32(x, step * i + apart)
        c, s = get_f32(cos, i), get_f32(sin, i)
        put_f32(x, step * i, a * c - b * s)
        put_f32(x, step * i + apart, a * s + b * c)
