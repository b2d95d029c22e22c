"""The Hadamard transform of rows on the host, as backends have it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def hadamard(x: Floats, block: int) -> Floats:
    """x [..., n] times the normalised Hadamard matrix in blocks of the last axis, in the order of
    sums of the backends' kernels; applied twice, it gives x back.

    Args:
        block: a power of two that divides n; 0 leaves `x` as it is.
    """
    if not block:
        return x
    y = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    for _ in range(block.bit_length() - 1):
        even, odd = y[..., 0::2], y[..., 1::2]
        y = np.concatenate((even + odd, even - odd), axis=-1)
    out: Floats = (y * np.float32(1 / math.sqrt(block))).reshape(x.shape)
    return out
