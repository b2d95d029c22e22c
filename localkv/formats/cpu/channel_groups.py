"""Encoding groups of tokens with scales by channel: `formats/channel_groups.py`, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from localkv.formats.channel_groups import BELOW_HALF, LARGEST, TOKENS
from localkv.formats.cpu.rounding import (
    ZERO,
    affine_code,
    inverse,
    put_half,
    scale,
    truncated,
    within,
)
from localkv.simd.memory import get_f16, get_f32, put_u8

LIMIT = np.float32(LARGEST)
ALMOST_HALF = np.float32(BELOW_HALF)


@njit
def stored(halves: Any, index: int, x: Any) -> Any:
    """What fp16 makes of a float, which is stored."""
    put_half(halves, index, x)
    return get_f16(halves, index)


@njit
def range_of_channel(x: Any, channel: int, head_dim: int) -> Any:
    """The least and the largest of a channel's values in rows of `head_dim` floats, within LARGEST,
    or NaN."""
    low = high = within(get_f32(x, channel), LIMIT)
    for token in range(TOKENS):
        value = within(get_f32(x, token * head_dim + channel), LIMIT)
        if value != value:
            return value, value
        low, high = min(low, value), max(high, value)
    return low, high


@njit
def affine_channel(x: Any, channel: int, head_dim: int, planes: Any, last: Any) -> Any:
    """Store d and m of a channel, in planes 0 and 1; the minimum and the factor of its codes."""
    low, high = range_of_channel(x, channel, head_dim)
    least = stored(planes[1], channel, low)
    # a NaN stays one: it is neither more nor less
    spread = (least if high < least else high) - least
    return least, inverse(stored(planes[0], channel, scale(spread, last)))


@njit
def symmetric_channel(x: Any, channel: int, head_dim: int, planes: Any, last: Any) -> Any:
    """Store d of a channel, in plane 0; the factor of its codes."""
    low, high = range_of_channel(x, channel, head_dim)
    return inverse(stored(planes[0], channel, scale(max(abs(low), abs(high)), last)))


@njit
def signed_code(value: Any, factor: Any, last: Any) -> Any:
    """The code of a symmetric channel's value: halves are rounded away from 0."""
    y = value * factor
    half = ALMOST_HALF if y >= ZERO else -ALMOST_HALF
    return truncated(y + half, -last, last)


@njit
def encode_channels(
    x: Any, planes: Any, codes: Any, head_dim: int, last: Any, affine: bool
) -> None:
    """A group float32 [TOKENS, head_dim] -> its halves in the first planes, codes as bytes [TOKENS,
    head_dim]."""
    for channel in range(head_dim):
        least = ZERO
        if affine:
            least, factor = affine_channel(x, channel, head_dim, planes, last)
        else:
            factor = symmetric_channel(x, channel, head_dim, planes, last)
        for token in range(TOKENS):
            at = token * head_dim + channel
            value = get_f32(x, at)
            if affine:
                put_u8(codes, at, affine_code(value, least, factor, last))
            else:
                put_u8(codes, at, signed_code(value, factor, last))
