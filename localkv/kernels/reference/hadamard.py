"""The Hadamard transform: a rotation that spreads an outlier over all the channels of its block.

Rows of K and V that are stored in blocks with one scale lose less when they are rotated first
(QuaRot, Ashkboos et al. 2024; llama.cpp does so too). Attention stays the same: q . k does not
change if both are rotated, and a sum of rotated rows of V is the rotated sum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard_transform(x: Tensor, block: int) -> Tensor:
    """`x` [..., n] times the normalised Hadamard matrix (Sylvester's) in blocks of the last axis.

    The matrix is symmetric and orthogonal: applied twice, the transform gives `x` back. Sums are
    made in pairs of distance 1, 2, 4, ..., for any shape, so that a row's result does not
    depend on its batch, and a fused kernel that does the same gets the same bits.

    Args:
        block: a power of two that divides n; 0 leaves `x` as it is.
    """
    if block == 0:
        return x
    if block & (block - 1) or x.shape[-1] % block:
        raise ValueError(f"a Hadamard transform of {block} does not fit {x.shape[-1]} channels")
    y = x.view(*x.shape[:-1], x.shape[-1] // block, block)
    # sums to the first half and differences to the second: after every bit of the channel's number
    # had its turn as the lowest, all channels are back in order
    for _ in range(block.bit_length() - 1):
        even, odd = y[..., 0::2], y[..., 1::2]
        y = torch.cat((even + odd, even - odd), dim=-1)
    return (y * (1 / math.sqrt(block))).flatten(-2)
