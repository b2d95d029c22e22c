"""One fp16 scale for a whole row of floats, where formats share it: `x = d * value`.

d is absmax / `largest`, rounded up, so that no scaled value is beyond the largest. Besides:

- d is at least fp16's smallest number: no division by 0, and a row of zeros has codes of 0.
- d is at most fp16's largest: of larger rows, and of infinities, the codec makes its largest value.
- A row that contains a NaN gets a NaN scale: an error shows, as it does in a cache of floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localkv.formats.bits import as_bytes, half

SMALLEST, LARGEST = 2.0**-24, 65504.0
"""The positive finite fp16 numbers."""


def scale_row(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Scales for rows, and the rows divided by them.

    Args:
        x: float32 [..., n].
        largest: the magnitude that the largest value of a row is to have at most.

    Returns:
        uint8 [..., 1, 2] (fp16 scales, as a plane) and float32 [..., n].
    """
    # a tensor, since on a GPU torch multiplies with the reciprocal of a divisor that is a number
    exact = x.abs().amax(-1, keepdim=True) / x.new_full((), largest)
    exact.clamp_(SMALLEST, LARGEST)
    nearest = exact.half()
    # of positive numbers the next larger one has the next larger bits
    too_small = nearest.float() < exact
    d = (nearest.view(torch.int16) + too_small).view(torch.float16)
    return as_bytes(d), x / d.float()


def row_scale(plane: Tensor) -> Tensor:
    """The scales of a plane: uint8 [..., 1, 2] -> float32 [..., 1]."""
    return half(plane).flatten(-2)
