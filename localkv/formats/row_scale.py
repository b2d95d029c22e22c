"""One fp16 scale for a whole row of floats, where formats share it: `x = d * value`.

d is absmax / `largest`, rounded up, so that no scaled value is beyond the largest. Besides:

- d is at least fp16's smallest number: no division by 0, and a row of zeros has codes of 0.
- d is at most fp16's largest: of larger rows, and of infinities, the codec makes its largest value.
- A row that contains a NaN gets a NaN scale: an error shows, as it does in a cache of floats.
"""

from __future__ import annotations

import numpy as np

from localkv.formats.bits import Bytes, Floats, as_bytes, half, ieee

SMALLEST, LARGEST = 2.0**-24, 65504.0
"""The positive finite fp16 numbers."""


@ieee
def scale_row(x: Floats, largest: float) -> tuple[Bytes, Floats]:
    """Scales for rows, and the rows divided by them.

    Args:
        x: float32 [..., n].
        largest: the magnitude that the largest value of a row is to have at most.

    Returns:
        uint8 [..., 1, 2] (fp16 scales, as a plane) and float32 [..., n].
    """
    exact = np.clip(np.abs(x).max(-1, keepdims=True) / largest, SMALLEST, LARGEST)
    nearest = exact.astype(np.float16)
    # of positive numbers the next larger one has the next larger bits
    too_small = nearest.astype(np.float32) < exact
    d = (nearest.view(np.int16) + too_small).view(np.float16)
    return as_bytes(d), x / d.astype(np.float32)


def row_scale(plane: Bytes) -> Floats:
    """The scales of a plane: uint8 [..., 1, 2] -> float32 [..., 1]."""
    return half(plane)[..., 0]


@ieee
def times_row_scale(values: Floats, plane: Bytes) -> Floats:
    """`values` [..., n] times the scales of their rows, in place."""
    values *= row_scale(plane)
    return values
