"""Dot products of bfloats: two products that are added to each lane of a float.

AVX512-BF16 has an instruction for it, which takes and gives numbers below 2^-126 as 0: half as many
instructions, and half as many bytes of activations, as products of floats take.
"""

from __future__ import annotations

from llvmlite import ir

from localkv.simd.cpu_features import HAS_BFLOAT_DOTS
from localkv.simd.kinds import Builder, Value
from localkv.simd.lanes import LANES
from localkv.simd.vector import call, constant, f32, i16, i32, lanes_of, multiply_add

PAIRS = 2 * LANES
"""bfloats of a vector."""


class _BFloatType(ir.Type):
    """What LLVM calls it; llvmlite has no such type."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloatType)

    def __hash__(self) -> int:
        return hash(_BFloatType)


bf16 = _BFloatType()


def rounded_to_bfloats(b: Builder, x: Value) -> Value:
    """The bits of the nearest bfloats, ties to even, as <16 x i16>; NaN stays NaN."""
    bits = b.bitcast(x, lanes_of(i32))
    odd = b.and_(b.lshr(bits, constant(i32, 16)), constant(i32, 1))
    near = b.lshr(b.add(b.add(bits, constant(i32, 0x7FFF)), odd), constant(i32, 16))
    near = b.select(b.fcmp_unordered("uno", x, x), constant(i32, 0x7FC0), near)
    return b.trunc(near, lanes_of(i16))


def _halves(b: Builder, x: Value) -> tuple[Value, Value]:
    """The second bfloat of each lane and the first, as floats."""
    second = b.and_(x, constant(i32, -1 << 16))
    first = b.shl(x, constant(i32, 16))
    return b.bitcast(second, lanes_of(f32)), b.bitcast(first, lanes_of(f32))


def dot_of_bfloats(b: Builder, total: Value, x: Value, y: Value) -> Value:
    """total + the products of two bfloats in each lane, as <16 x float>.

    Args:
        x, y: <16 x i32>, two bfloats to a lane.
    """
    if HAS_BFLOAT_DOTS:
        pairs = lanes_of(bf16, PAIRS)
        factors = b.bitcast(x, pairs), b.bitcast(y, pairs)
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", lanes_of(f32), [total, *factors])
    for one, other in zip(_halves(b, x), _halves(b, y), strict=True):
        total = multiply_add(b, one, other, total)
    return total
