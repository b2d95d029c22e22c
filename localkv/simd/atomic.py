"""Cooperation of threads in compiled code: atomics, pauses, Linux's futex, the time.

Items are int64 at a base and an index, as in `memory`. A futex is the lower half of one.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from localkv.simd.cpu_features import FUTEX, IS_ARM64, IS_X86
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.vector import call, check_base, i32, i64, pointer

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


_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129


def _read_modify_write(operation: str) -> Any:
    @intrinsic
    def atomic(typing: Typing, base: Kind, index: Kind, value: Kind) -> Intrinsic:
        check_base(base)

        def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
            where = pointer(context, builder, signature.args[0], args[0], args[1], i64)
            return builder.atomic_rmw(operation, where, args[2], "seq_cst")

        return types.int64(base, types.intp, types.int64), generate

    return atomic


atomic_add = _read_modify_write("add")
atomic_or = _read_modify_write("or")
atomic_exchange = _read_modify_write("xchg")
"""These return the item's value before."""


@intrinsic
def atomic_load(typing: Typing, base: Kind, index: Kind) -> Intrinsic:
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        where = pointer(context, builder, signature.args[0], args[0], args[1], i64)
        return builder.load_atomic(where, "seq_cst", 8)

    return types.int64(base, types.intp), generate


@intrinsic
def compare_exchange(
    typing: Typing, base: Kind, index: Kind, expected: Kind, value: Kind
) -> Intrinsic:
    """Replace the item by `value` if it is `expected`; whether it was."""
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        where = pointer(context, builder, signature.args[0], args[0], args[1], i64)
        pair = builder.cmpxchg(where, args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(base, types.intp, types.int64, types.int64), generate


@intrinsic
def pause(typing: Typing) -> Intrinsic:
    """Tell the CPU that this thread waits in a loop."""

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        if IS_X86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif IS_ARM64:  # ARM's own hint does nothing on most cores; this takes some ten cycles
            call(builder, "llvm.aarch64.isb", ir.VoidType(), [ir.Constant(i32, 15)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def yield_cpu(typing: Typing) -> Intrinsic:
    """Let another thread run that waits for this core (POSIX)."""

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


def _futex(operation: int) -> Any:
    """The system call with an item and a number."""

    @intrinsic
    def futex(typing: Typing, base: Kind, index: Kind, value: Kind) -> Intrinsic:
        check_base(base)

        def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
            where = pointer(context, builder, signature.args[0], args[0], args[1], i64)
            kind = ir.FunctionType(i64, [i64], var_arg=True)
            syscall = cgutils.get_or_insert_function(builder.module, kind, "syscall")
            number, zero = ir.Constant(i64, FUTEX), ir.Constant(i64, 0)
            numbers = [number, builder.ptrtoint(where, i64), ir.Constant(i64, operation)]
            builder.call(syscall, [*numbers, args[2], zero, zero, zero])
            return context.get_dummy_value()

        return types.void(base, types.intp, types.int64), generate

    return futex


futex_wait = _futex(_WAIT_PRIVATE)
"""Sleep until woken, unless the lower half of an item is not the number."""
futex_wake = _futex(_WAKE_PRIVATE)
"""Wake up to that number of threads that sleep at an item."""
