"""Looking floats up in memory, a lane each."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from localkv.simd.cpu_features import HAS_AVX512
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.vector import F32x16, I32x16, call, check_base, f32, i32, lanes_of, pointer


def _gathered(builder: Builder, table: Value, index: Value) -> Value:
    """table[index] of each lane, one load after the other."""
    out = ir.Constant(lanes_of(f32), ir.Undefined)
    for lane in range(LANES):
        at = builder.extract_element(index, ir.Constant(i32, lane))
        item = builder.load(builder.gep(table, [at]), align=4)
        out = builder.insert_element(out, item, ir.Constant(i32, lane))
    return out


@intrinsic
def gather_f32(typing: Typing, base: Kind, index: Kind) -> Intrinsic:
    """The floats at `index` (I32x16), counted from `base`."""
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        zero = ir.Constant(context.get_value_type(types.intp), 0)
        table = pointer(context, builder, signature.args[0], args[0], zero, f32)
        return _gathered(builder, table, args[1])

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
