"""How values become integer codes and scales, where formats share it: ggml's rounding.

The functions take float32 [..., n_blocks, block size] and agree bit for bit with ggml's
`quantize_row_*_ref` (ggml-quants.c) wherever those yield numbers. Elsewhere:

- A scale or minimum beyond fp16 saturates, so that huge values and infinities decode to the
  largest values of the type, and never to infinity (which would be NaN times a code of 0).
- A scale too small for its inverse to be finite counts as 0; as fp16 it is 0 anyway.
- A block that contains a NaN gets a NaN scale: an error shows, as it does in a cache of floats.

Types that have one fp16 scale for a whole row, `x = d * value`, take it from `scale_row`. d is
absmax / `largest`, rounded up, so that no scaled value is beyond the largest.

- d is at least fp16's smallest number: no division by 0, and a row of zeros has codes of 0.
- d is at most fp16's largest: of larger rows, and of infinities, the codec makes its largest value.
- A row that contains a NaN gets a NaN scale.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localkv.quant_formats.shared.bits import Bytes, Floats, as_bytes, half, ieee

F16_LIMIT = 65519.99609375
"""The largest float32 that rounds to a finite fp16, 65504."""

SMALLEST_HALF, LARGEST_HALF = 2.0**-24, 65504.0
"""The smallest and the largest positive fp16 number."""

BELOW_HALF = 0.5 - 2**-25


def blocks(x: Floats, block_size: int) -> Floats:
    """A view of [..., n] as [..., n_blocks, block size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // block_size, block_size)


@ieee
def scale_and_inverse(extreme: Floats, steps: float) -> tuple[Floats, Floats]:
    """`extreme / steps` within fp16's range, and the factor that turns values into codes."""
    d = np.clip(extreme / steps, -F16_LIMIT, F16_LIMIT)
    inverse = 1 / d
    inverse[~np.isfinite(inverse)] = 0
    return d, inverse


def truncated(x: Floats, smallest: int, largest: int) -> NDArray[np.int8]:
    """Rounded towards zero and clamped, in place: float32 -> int8; a NaN becomes 0."""
    np.clip(x, smallest, largest, out=x)
    x[np.isnan(x)] = 0
    return x.astype(np.int8)


@ieee
def rounded(y: Floats, limit: int) -> NDArray[np.int8]:
    """To the nearest integer within +-limit, halves away from zero as C's roundf, in place."""
    # the added value is less than a half, lest the float below 0.5 be rounded up to 1
    y += np.copysign(np.float32(BELOW_HALF), y)
    return truncated(y, -limit, limit)


def largest_magnitude(x: Floats) -> Floats:
    """The value furthest from 0, the first of several, or NaN: [..., n] -> [..., 1]."""
    return np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)


def sum_in_order(x: Floats) -> Floats:
    """The sum over each block of [..., n_blocks, n], one value after the other, as in C."""
    total = np.zeros(x.shape[:-1], np.float32)
    for column in np.ascontiguousarray(np.moveaxis(x, -1, 0)):
        total += column
    return total[..., None]


@ieee
def fitted_scale(products: Floats, squares: Floats, d: Floats) -> Floats:
    """The scale of the least squared error of codes that have been chosen, within fp16's range.

    Args:
        products, squares: of each value x and its code c, x c and c c, both times its weight:
            float32 [..., n_blocks, 32].
        d: the scale where all codes are 0, float32 [..., n_blocks, 1].
    """
    above, below = (sum_in_order(t[..., :16] + t[..., 16:]) for t in (products, squares))
    return np.clip(np.where(below > 0, above / below, d), -F16_LIMIT, F16_LIMIT)


@ieee
def symmetric_codes(x: Floats, n_bits: int) -> tuple[Floats, Bytes]:
    """`x = d (code - half)`, where half is 2 ** (n_bits - 1) and the largest magnitude has code 0.

    Returns:
        d float32 [..., n_blocks, 1], codes uint8 of the shape of `x`.
    """
    half = 1 << (n_bits - 1)
    d, inverse = scale_and_inverse(largest_magnitude(x), -half)
    codes = truncated(x * inverse + (half + 0.5), 0, 2 * half - 1)
    return d, codes.view(np.uint8)


@ieee
def affine_codes(x: Floats, n_bits: int) -> tuple[Floats, Floats, Bytes]:
    """`x = d code + m`, where the smallest value has code 0 and the largest the last one.

    Returns:
        d, m float32 [..., n_blocks, 1], codes uint8 of the shape of `x`.
    """
    last = (1 << n_bits) - 1
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    m = np.clip(low, -F16_LIMIT, F16_LIMIT)
    d, inverse = scale_and_inverse(np.maximum(high, m) - m, last)
    codes = truncated((x - m) * inverse + 0.5, 0, last)
    return d, m, codes.view(np.uint8)


@ieee
def scale_row(x: Floats, largest: float) -> tuple[Bytes, Floats]:
    """Scales for rows, and the rows divided by them.

    Args:
        x: float32 [..., n].
        largest: the magnitude that the largest value of a row is to have at most.

    Returns:
        uint8 [..., 1, 2] (fp16 scales, as a plane) and float32 [..., n].
    """
    exact = np.clip(np.abs(x).max(-1, keepdims=True) / largest, SMALLEST_HALF, LARGEST_HALF)
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
