"""The Hadamard transform of rows in registers: `kernels/reference/hadamard.py`, bit for bit."""

from __future__ import annotations

import math

import triton
import triton.language as tl


@triton.constexpr_function
def log2(n):
    """Of a power of two."""
    return n.bit_length() - 1


@triton.constexpr_function
def inverse_root(n):
    """1 / sqrt(n)."""
    return 1 / math.sqrt(n)


@triton.jit
def hadamard(x, BLOCK: tl.constexpr):
    """x [rows, n], fp32, times the normalised matrix in blocks of the last axis; 0 leaves it."""
    if BLOCK > 0:
        rows: tl.constexpr = x.shape[0]
        blocks: tl.constexpr = x.shape[1] // BLOCK
        for _ in tl.static_range(log2(BLOCK)):
            even, odd = tl.split(tl.reshape(x, (rows, blocks, BLOCK // 2, 2)))
            sums = tl.permute(tl.join(even + odd, even - odd), (0, 1, 3, 2))
            x = tl.reshape(sums, (rows, blocks * BLOCK))
        x = x * inverse_root(BLOCK)
    return x
