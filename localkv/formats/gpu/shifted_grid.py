"""iq1's grid as a table of bytes, and what a shift up or down subtracts from them."""

from __future__ import annotations

import triton
import triton.language as tl

CENTRE = 8
"""What bytes are more than eight times the grid's values."""
UPPER = tl.constexpr(0x6400_6400 + (CENTRE - 1) * 0x1_0001)
"""Twice 1024 + 7 in fp16: values are an eighth more."""


@triton.jit
def offset_of(is_lower):
    """int32: what `unpack_shifted_points` subtracts, by the lowest bit of `is_lower`."""
    return (is_lower & 1) * 0x2_0002 + UPPER
