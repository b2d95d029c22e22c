"""Floats by their bits: fp8 and bf16, and numbers that must stay finite in fp16.

Every GPU can do that, old ones that have no fp8 too, and so can Triton's interpreter, whose own
casts to fp8 and from fp32 to bf16 are wrong. Encoders round to nearest, ties to even; fp8 saturates
at its largest number, infinities too. A NaN stays one.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from localkv.triton_primitives.ptx import e4m3_ptx, e5m2_ptx


@triton.jit
def decode_e4m3(u, PTX: tl.constexpr):
    """uint8 [...] -> fp16 [...]; NaN reads as +-480, which no number is encoded as."""
    if PTX:
        return tl.inline_asm_elementwise(
            e4m3_ptx(), "=r,=r,r", [u], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        bits = ((u & 0x80).to(tl.uint16) << 8) | ((u & 0x7F).to(tl.uint16) << 7)
        return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def decode_e5m2(u, PTX: tl.constexpr):
    """uint8 [...] -> fp16 [...]."""
    if PTX:
        return tl.inline_asm_elementwise(
            e5m2_ptx(), "=r,=r,r", [u], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        return (u.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def decode_bf16(u):
    """uint16 [...] -> fp32 [...]."""
    return (u.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def rounded_shift(bits, SHIFT: tl.constexpr):
    """`bits / 2 ** SHIFT`, uint32, to nearest, ties to even."""
    return (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT


@triton.jit
def encode_fp8(x, EXPONENT_BITS: tl.constexpr, LARGEST: tl.constexpr):
    """fp32 [...] -> uint8 [...] with EXPONENT_BITS (4 or 5), the rest of 7 bits mantissa."""
    mantissa: tl.constexpr = 7 - EXPONENT_BITS
    bias: tl.constexpr = (1 << (EXPONENT_BITS - 1)) - 1
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    size = tl.minimum(tl.where(is_nan, 0, magnitude).to(tl.float32, bitcast=True), LARGEST)
    normal = rounded_shift(size.to(tl.uint32, bitcast=True), 23 - mantissa)
    normal = normal - ((127 - bias) << mantissa)
    # below the least normal number: added to a float whose last bit is worth as much as fp8's
    coarse: tl.constexpr = 24 - mantissa - bias
    subnormal = (size + 1.0 * (1 << coarse)).to(tl.uint32, bitcast=True) - ((127 + coarse) << 23)
    code = tl.where(size < 1.0 / (1 << (bias - 1)), subnormal, normal)
    return (tl.where(is_nan, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def encode_e4m3(x):
    """fp32 [...] -> uint8 [...]."""
    return encode_fp8(x, 4, 448.0)


@triton.jit
def encode_e5m2(x):
    """fp32 [...] -> uint8 [...]."""
    return encode_fp8(x, 5, 57344.0)


@triton.jit
def encode_bf16(x):
    """fp32 [...] -> uint16 [...]."""
    bits = x.to(tl.uint32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FC0, rounded_shift(bits, 16)).to(tl.uint16)


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
