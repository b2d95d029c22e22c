"""Numbers that must not become infinite where they are rounded to fp16 or multiplied in it."""

from __future__ import annotations

import math

import triton
import triton.language as tl

F16_MAX = tl.constexpr(65504.0)


@triton.constexpr_function
def largest_scale(code):
    """The largest fp16 number whose product with `code` is finite."""
    mantissa, exponent = math.frexp(65504.0 / code)
    return math.ldexp(math.floor(mantissa * 2**11), exponent - 11)


@triton.jit
def saturate(x, LIMIT: tl.constexpr):
    """`x` within +-LIMIT; a NaN stays one, so that an error shows."""
    limit = tl.full((1,) * len(x.shape), LIMIT, x.dtype)
    below = tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(below, -limit, propagate_nan=tl.PropagateNan.ALL)
