"""How values become integer codes and a scale, where formats share it: ggml's rounding.

The functions take float32 [..., n_blocks, block size] and agree bit for bit with ggml's
`quantize_row_*_ref` (ggml-quants.c) wherever those yield numbers. Elsewhere:

- A scale or minimum beyond fp16 saturates, so that huge values and infinities decode to the
  largest values of the type, and never to infinity (which would be NaN times a code of 0).
- A scale too small for its inverse to be finite counts as 0; as fp16 it is 0 anyway.
- A block that contains a NaN gets a NaN scale: an error shows, as it does in a cache of floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

F16_LIMIT = 65519.99609375
"""The largest float32 that rounds to a finite fp16, 65504."""


def blocks(x: Tensor, block_size: int) -> Tensor:
    """A view of [..., n] as [..., n_blocks, block size]."""
    return x.view(*x.shape[:-1], x.shape[-1] // block_size, block_size)


def scale_and_inverse(extreme: Tensor, steps: float) -> tuple[Tensor, Tensor]:
    """`extreme / steps` within fp16's range, and the factor that turns values into codes."""
    # a tensor, since on a GPU torch multiplies with the reciprocal of a divisor that is a number
    d = (extreme / extreme.new_full((), steps)).clamp_(-F16_LIMIT, F16_LIMIT)
    return d, d.reciprocal().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def truncated(x: Tensor, smallest: int, largest: int) -> Tensor:
    """Rounded towards zero and clamped, in place: float32 -> int8; a NaN becomes a number."""
    return x.nan_to_num_().clamp_(smallest, largest).to(torch.int8)


def largest_magnitude(x: Tensor) -> Tensor:
    """The value furthest from 0, the first of several, or NaN: [..., n] -> [..., 1]."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True))


def sum_in_order(x: Tensor) -> Tensor:
    """The sum over each block of [..., n_blocks, n], one value after the other, as in C."""
    total = torch.zeros_like(x[..., 0])
    for column in x.movedim(-1, 0).contiguous():
        total += column
    return total.unsqueeze(-1)


def symmetric_codes(x: Tensor, n_bits: int) -> tuple[Tensor, Tensor]:
    """`x = d (code - half)`, where half is 2 ** (n_bits - 1) and the largest magnitude has code 0.

    Returns:
        d float32 [..., n_blocks, 1], codes uint8 of the shape of `x`.
    """
    half = 1 << (n_bits - 1)
    d, inverse = scale_and_inverse(largest_magnitude(x), -half)
    codes = truncated((x * inverse).add_(half + 0.5), 0, 2 * half - 1)
    return d, codes.view(torch.uint8)


def affine_codes(x: Tensor, n_bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """`x = d code + m`, where the smallest value has code 0 and the largest the last one.

    Returns:
        d, m float32 [..., n_blocks, 1], codes uint8 of the shape of `x`.
    """
    last = (1 << n_bits) - 1
    low, high = x.aminmax(dim=-1, keepdim=True)
    m = low.clamp(-F16_LIMIT, F16_LIMIT)
    d, inverse = scale_and_inverse(torch.maximum(high, m) - m, last)
    codes = truncated((x - m).mul_(inverse).add_(0.5), 0, last)
    return d, m, codes.view(torch.uint8)
