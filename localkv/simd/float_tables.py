"""Looking floats up in memory, a lane each."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from localkv.simd.cpu_features import HAS_AVX512
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.vector import (
    F32x16,
    I32x16,
    call,
    check_base,
    constant,
    f32,
    i32,
    lanes_of,
    pointer,
)


def _gathered(builder: Builder, table: Value, index: Value) -> Value:
    """table[index] of each lane, one load after the other."""
    out = ir.Constant(lanes_of(f32), ir.Undefined)
    for lane in range(LANES):
        at = builder.extract_element(index, ir.Constant(i32, lane))
        item = builder.load(builder.gep(table, [at]), align=4)
        out = builder.insert_element(out, item, ir.Constant(i32, lane))
    return out


@intrinsic
def gather_of_64(typing: Typing, base: Kind, index: Kind) -> Intrinsic:
    """The floats at `index` (I32x16, each below 64) of the 64 at `base`."""
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        start = ir.Constant(context.get_value_type(types.intp), 0)
        if not HAS_AVX512:
            table = pointer(context, builder, signature.args[0], args[0], start, f32)
            return _gathered(builder, table, args[1])

        def part(first: int) -> Value:
            at = builder.add(start, ir.Constant(start.type, first))
            where = pointer(context, builder, signature.args[0], args[0], at, f32, LANES)
            return builder.load(where, align=4)

        # vpermi2ps looks at the lowest five bits of a lane's index
        low, high = (
            call(
                builder,
                "llvm.x86.avx512.vpermi2var.ps.512",
                F32x16.llvm,
                [part(first), args[1], part(first + LANES)],
            )
            for first in (0, 2 * LANES)
        )
        is_low = builder.icmp_signed("<", args[1], constant(i32, 2 * LANES))
        return builder.select(is_low, low, high)

    return F32x16(base, I32x16), generate


@intrinsic
def look_up_f32(typing: Typing, base: Kind, codes: Kind) -> Intrinsic:
    """The floats at `codes` (I32x16, each below 16) of the 16 at `base`."""
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        zero = ir.Constant(context.get_value_type(types.intp), 0)
        if not HAS_AVX512:
            table = pointer(context, builder, signature.args[0], args[0], zero, f32)
            return _gathered(builder, table, args[1])
        where = pointer(context, builder, signature.args[0], args[0], zero, f32, LANES)
        table = builder.load(where, align=4)
        # vpermps looks at the lowest four bits of a lane's index
        return call(builder, "llvm.x86.avx512.permvar.sf.512", F32x16.llvm, [table, args[1]])

    return F32x16(base, I32x16), generate
