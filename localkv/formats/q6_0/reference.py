"""q6_0: 6-bit codes and a scale, `x = d (q - 32)` (ik_llama.cpp's `block_q6_0`).

Bits 0 to 3 of the codes are in `qs`. Byte i of `qh` has bits 4 and 5 of four codes, from the lowest
bit on: i, i + 16, i + 8, i + 24.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localkv.formats.bits import bit_fields, half, half_bytes, less, pack_bits, scaled
from localkv.formats.rounding import (
    F16_LIMIT,
    blocks,
    largest_magnitude,
    scale_and_inverse,
    sum_in_order,
    truncated,
)

LIMIT = 32 * F16_LIMIT
"""The largest value that a scale reaches."""


def _middle_swapped(runs: Tensor) -> Tensor:
    """Four runs of 8 with the second and the third in each other's place: [..., 32]."""
    return runs.view(*runs.shape[:-1], 2, 2, 8).transpose(-3, -2).flatten(-3)


def decode(planes: Sequence[Tensor]) -> Tensor:
    """d (fp16), qh (8 bytes), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, qh, qs = planes
    high = _middle_swapped(bit_fields(qh, n_bits=2, run=8))
    return scaled(less(bit_fields(qs, n_bits=4, run=16) | (high << 4), 32), half(d))


def encode(x: Tensor) -> tuple[Tensor, ...]:
    """float32 [..., n] -> d, qh, qs (ik_llama.cpp's `quantize_row_q6_0_ref`).

    Codes are chosen with the scale that makes the largest magnitude -32; then the scale becomes the
    one of the least squared error, each weighted with its value's square.
    """
    x = blocks(x, 32).clamp(-LIMIT, LIMIT)
    d, inverse = scale_and_inverse(largest_magnitude(x), -32)
    y = x * inverse
    codes = truncated(y + 32.5, 0, 63).view(torch.uint8)
    q = codes.to(torch.float32).sub_(32)
    weights = y.square_()
    products, squares = (
        sum_in_order(low + high)
        for low, high in ((weights * x * q).chunk(2, -1), (weights * q * q).chunk(2, -1))
    )
    d = torch.where(squares > 0, products / squares, d).clamp_(-F16_LIMIT, F16_LIMIT)
    qh = pack_bits(_middle_swapped(codes >> 4), n_bits=2, run=8)
    return half_bytes(d), qh, pack_bits(codes & 15, n_bits=4, run=16)
