"""Look-up of codes that are bytes (`simd/quads.py`) in a table that is read when the kernel runs.

AVX-512 only, as are the kernels that read codes as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.quads import BYTES
from localkv.simd.vector import (
    I32x16,
    call,
    check_base,
    constant,
    f32,
    i8,
    i32,
    lanes_of,
    lanewise,
    pointer,
)


def _numbers(
    context: Target, builder: Builder, signature: Signature, args: Args, offset: int
) -> Value:
    """The 16 floats at a base, `offset` larger, as bytes."""
    start = ir.Constant(context.get_value_type(types.intp), 0)
    where = pointer(context, builder, signature.args[0], args[0], start, f32, LANES)
    floats = builder.load(where, align=4)
    whole = builder.fptosi(floats, lanes_of(i32))
    return builder.trunc(builder.add(whole, constant(i32, offset)), lanes_of(i8))


def _table(builder: Builder, numbers: Value, order: Sequence[int]) -> Value:
    """Numbers in an order, as often as a vector has room for them."""
    mask = ir.Constant(lanes_of(i32, BYTES), list(order) * (BYTES // len(order)))
    return builder.bitcast(builder.shuffle_vector(numbers, numbers, mask), I32x16.llvm)


@intrinsic(prefer_literal=True)
def byte_table(typing: Typing, base: Kind, offset: Kind) -> Intrinsic:
    """The 16 integers that are floats at `base`, `offset` larger: for `look_up_quad`."""
    check_base(base)
    n = offset.literal_value

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        numbers = _numbers(context, builder, signature, args, n)
        return _table(builder, numbers, range(LANES))

    return I32x16(base, offset), generate


@intrinsic(prefer_literal=True)
def pair_tables(typing: Typing, base: Kind, offset: Kind, codes: Kind) -> Intrinsic:
    """Tables for nibbles that are two bits of two codes, of the lower codes and of the higher.

    Of 8 `codes` they have 32 entries, for `look_up_of_64`: bit 4 is the code's third bit.
    """
    check_base(base)
    n, n_codes = offset.literal_value, codes.literal_value

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        numbers = _numbers(context, builder, signature, args, n)
        indices = range(LANES * n_codes // 4)
        both = [
            _table(builder, numbers, [i % LANES >> shift & 3 | i // LANES << 2 for i in indices])
            for shift in (0, 2)
        ]
        return context.make_tuple(builder, signature.return_type, both)

    return UniTuple(I32x16, 2)(base, offset, codes), generate


def _looked_up(name: str) -> Callable[[Builder, Value, Value], Value]:
    def look_up(builder: Builder, codes: Value, table: Value) -> Value:
        kind = lanes_of(i8, BYTES)
        both = [builder.bitcast(x, kind) for x in (table, codes)]
        return builder.bitcast(call(builder, name, kind, both), I32x16.llvm)

    return look_up


look_up_quad = lanewise(_looked_up("llvm.x86.avx512.pshuf.b.512"), [I32x16, I32x16], I32x16)
"""table[code] of each byte, 0 to 15."""
look_up_of_64 = lanewise(_looked_up("llvm.x86.avx512.permvar.qi.512"), [I32x16, I32x16], I32x16)
"""The same of bytes from 0 to 63; needs VBMI."""
