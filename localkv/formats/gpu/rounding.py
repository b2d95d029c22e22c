"""How rows become codes and scales: `formats/rounding.py`, bit for bit, in a kernel.

Kernels that use it must be launched with `enable_fp_fusion=False`: a fused multiply-add rounds once
where ggml rounds twice. Values are in blocks, fp32 [rows, blocks, 32]; scales are [rows, blocks].
"""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.rounding import F16_LIMIT as LIMIT

F16_LIMIT = tl.constexpr(LIMIT)
F32_LARGEST = tl.constexpr(3.4028234663852886e38)
BELOW_HALF = tl.constexpr(0.5 - 2**-25)
NAN = tl.constexpr(float("nan"))


@triton.jit
def in_blocks(x):
    """[rows, WIDTH] -> [rows, WIDTH / 32, 32]."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // 32, 32))


@triton.jit
def limited(x, LIMIT: tl.constexpr):
    """`x` within +-LIMIT; a NaN becomes -LIMIT or LIMIT."""
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def limited_numbers(x, LIMIT: tl.constexpr):
    """`x` within +-LIMIT; a NaN stays one."""
    return tl.where(x == x, limited(x, LIMIT), x)


@triton.jit
def scale_and_inverse(extreme, has_nan, STEPS: tl.constexpr):
    """`extreme / STEPS` within fp16's range, and the factor that turns values into codes."""
    d = limited(tl.div_rn(extreme, STEPS), F16_LIMIT)
    inverse = tl.div_rn(1.0, d)
    usable = (tl.abs(inverse) <= F32_LARGEST) & (has_nan == 0)
    return tl.where(has_nan, NAN, d), tl.where(usable, inverse, 0.0)


@triton.jit
def truncated(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Rounded towards zero and clamped: fp32 -> int32; a NaN becomes the number next to 0."""
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, LOW * 1.0), HIGH * 1.0).to(tl.int32)


@triton.jit
def rounded(y, LIMIT: tl.constexpr):
    """To the nearest integer within +-LIMIT, halves away from zero as C's roundf: int32."""
    # the added value is less than a half, lest the float below 0.5 be rounded up to 1
    return truncated(y + tl.where(y < 0, -BELOW_HALF, BELOW_HALF), -LIMIT, LIMIT)


@triton.jit
def largest_magnitude(x):
    """The value furthest from 0, the first of several; and whether there is a NaN."""
    is_nan = x != x
    size = tl.where(is_nan, -1.0, tl.abs(x))
    i = tl.arange(0, 32)[None, None, :]
    first = tl.min(tl.where(size == tl.max(size, 2)[:, :, None], i, 32), 2)
    # as bits: their sum keeps the sign of a 0
    bits = tl.where((i == first[:, :, None]) & (is_nan == 0), x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 2).to(tl.float32, bitcast=True), tl.max(is_nan.to(tl.int32), 2) > 0


@triton.jit
def symmetric_codes(x, BITS: tl.constexpr):
    """`x = d (code - half)`, where the largest magnitude has code 0 -> d, int32 codes."""
    half: tl.constexpr = 1 << (BITS - 1)
    extreme, has_nan = largest_magnitude(x)
    d, inverse = scale_and_inverse(extreme, has_nan, -1.0 * half)
    return d, truncated(x * inverse[:, :, None] + (half + 0.5), 0, 2 * half - 1)


@triton.jit
def affine_codes(x, BITS: tl.constexpr):
    """`x = d code + m`, where the smallest value has code 0 -> d, m, int32 codes."""
    last: tl.constexpr = (1 << BITS) - 1
    is_nan = x != x
    has_nan = tl.max(is_nan.to(tl.int32), 2) > 0
    finite = tl.where(is_nan, 0.0, x)
    m = limited(tl.min(finite, 2), F16_LIMIT)
    d, inverse = scale_and_inverse(tl.maximum(tl.max(finite, 2), m) - m, has_nan, last * 1.0)
    m = tl.where(has_nan, NAN, m)
    return d, m, truncated((x - m[:, :, None]) * inverse[:, :, None] + 0.5, 0, last)


@triton.jit
def sum_in_order(x):
    """The sum over each block of [rows, blocks, n], one value after the other, as in C."""
    i = tl.arange(0, x.shape[2])[None, None, :]
    total = tl.zeros((x.shape[0], x.shape[1]), tl.float32)
    for column in range(x.shape[2]):
        total += tl.sum(tl.where(i == column, x, 0.0), 2)
    return total


@triton.jit
def fitted_scale(products, squares, d):
    """The scale of the least squared error of codes that have been chosen; d where all are 0.

    `products` and `squares` are fp32 [rows, blocks, 32]; a NaN stays one.
    """
    low, high = two_halves(products)
    above = sum_in_order(low + high)
    low, high = two_halves(squares)
    below = sum_in_order(low + high)
    return tl.where(below > 0, limited_numbers(tl.div_rn(above, below), F16_LIMIT), d)


@triton.jit
def two_halves(x):
    """The halves of each block: [rows, blocks, n] -> [rows, blocks, n / 2] twice."""
    pairs = tl.reshape(x, (x.shape[0], x.shape[1], 2, x.shape[2] // 2))
    return tl.split(tl.permute(pairs, (0, 1, 3, 2)))


@triton.jit
def pack_nibbles(codes):
    """The low 4 bits of codes, as ggml packs them: [rows, blocks, 32] -> uint8 [rows, bytes]."""
    low, high = two_halves(codes & 15)
    return tl.reshape(low | (high << 4), (codes.shape[0], codes.shape[1] * 16)).to(tl.uint8)


@triton.jit
def pack_fifth_bits(codes):
    """Bit 4 of code i as bit i: [rows, blocks, 32] -> int32 [rows, blocks]."""
    return tl.sum(((codes >> 4) & 1) << tl.arange(0, 32)[None, None, :], 2)
