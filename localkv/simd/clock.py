"""The time, in compiled code."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.simd.kinds import Args, Builder, Intrinsic, Signature, Target, Typing, Value
from localkv.simd.vector import i32, i64

_CLOCK_MONOTONIC = 1
"""Linux's number."""


@intrinsic
def clock_ns(typing: Typing) -> Intrinsic:
    """Nanoseconds since some moment (Linux); about 25 of them pass in the call."""

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        kind = ir.FunctionType(i32, [i32, i64.as_pointer()])
        clock = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        now = cgutils.alloca_once(builder, i64, size=2)
        builder.call(clock, [ir.Constant(i32, _CLOCK_MONOTONIC), now])
        seconds = builder.load(now)
        nanoseconds = builder.load(builder.gep(now, [ir.Constant(i32, 1)]))
        return builder.add(builder.mul(seconds, ir.Constant(i64, 10**9)), nanoseconds)

    return types.int64(), generate
