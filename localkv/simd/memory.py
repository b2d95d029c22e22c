"""Loads that convert, stores, prefetch and scalars, at a base and an index (see the package)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.errors import RequireLiteralValue
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from localkv.simd import LANES
from localkv.simd.cpu_features import CONVERTS_HALF, IS_ZEN5
from localkv.simd.kinds import (
    Address,
    Args,
    Builder,
    Intrinsic,
    Kind,
    Signature,
    Target,
    Typing,
    Value,
)
from localkv.simd.vector import (
    F32x16,
    I32x16,
    Mask16,
    call,
    check_base,
    constant,
    f16,
    f32,
    i8,
    i16,
    i32,
    i64,
    lanes_of,
    pointer,
    splat,
)

NEAR_BYTES, FAR_BYTES = 1024, 8192
"""How far ahead a stream asks for memory, in two steps.

The nearest cache has room for few lines on their way. So only lines come that are in the second
cache by then. The second cache's own prefetching ends with a page of 4 KiB, and fails where a
stream is not read from line to line, as in records of K-quants. A Zen 5 has room for more, and a
second request costs it an eighth (Q6_K) to a quarter (Q8_0) of the time.
"""


def on_stack(builder: Builder, n_bytes: int, alignment: int) -> Value:
    """The address, an i64, of memory on the stack of the function, with anything in it.

    Numba's `alloca_once` would fill it, a byte at a time, which LLVM takes minutes over.
    """
    with builder.goto_entry_block():
        place = builder.alloca(ir.ArrayType(i8, n_bytes))
    place.align = alignment
    return builder.ptrtoint(place, i64)


def half_bits_to_float(builder: Builder, bits: Value) -> Value:
    """<16 x i16> with the bits of halves -> <16 x float>, exactly."""
    if CONVERTS_HALF:
        return builder.fpext(builder.bitcast(bits, lanes_of(f16)), lanes_of(f32))
    wide = builder.zext(bits, lanes_of(i32))
    sign = builder.shl(builder.and_(wide, constant(i32, 0x8000)), constant(i32, 16))
    # shifted to where single precision keeps them, exponent and mantissa are 2^-112 too small
    magnitude = builder.shl(builder.and_(wide, constant(i32, 0x7FFF)), constant(i32, 13))
    value = builder.fmul(builder.bitcast(magnitude, lanes_of(f32)), constant(f32, 2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, constant(i32, 31 << 23))
    value_bits = builder.bitcast(value, lanes_of(i32))
    infinite = builder.or_(value_bits, constant(i32, 0x7F800000))
    value_bits = builder.select(special, infinite, value_bits)
    return builder.bitcast(builder.or_(value_bits, sign), lanes_of(f32))


def _from_f16(builder: Builder, x: Value) -> Value:
    return half_bits_to_float(builder, x)


def _from_bf16(builder: Builder, x: Value) -> Value:
    high = builder.shl(builder.zext(x, lanes_of(i32)), constant(i32, 16))
    return builder.bitcast(high, lanes_of(f32))


def _from_e5m2(builder: Builder, x: Value) -> Value:
    # the upper byte of a half
    high = builder.shl(builder.zext(x, lanes_of(i16)), constant(i16, 8))
    return half_bits_to_float(builder, high)


def _from_e4m3(builder: Builder, x: Value) -> Value:
    # exponent and mantissa one bit to the right of a half's, biased by 7, not 15: 2^8 too small.
    # There is no infinity; the one NaN becomes 480 instead, which no encoder makes.
    wide = builder.zext(x, lanes_of(i16))
    sign = builder.shl(builder.and_(wide, constant(i16, 0x80)), constant(i16, 8))
    magnitude = builder.shl(builder.and_(wide, constant(i16, 0x7F)), constant(i16, 7))
    value = half_bits_to_float(builder, builder.or_(sign, magnitude))
    return builder.fmul(value, constant(f32, 256.0))


def _same(builder: Builder, x: Value) -> Value:
    return x


def _loader(item: ir.Type, convert: Callable[[Any, Any], Any], result: Any, n: int = LANES) -> Any:
    """An intrinsic that reads `n` items at an index; an alignment of 1 costs x86 nothing."""

    @intrinsic
    def load(typing: Typing, base: Kind, index: Kind) -> Intrinsic:
        check_base(base)

        def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
            where = pointer(context, builder, signature.args[0], args[0], args[1], item, n)
            return convert(builder, builder.load(where, align=1))

        return result(base, types.intp), generate

    return load


def _storer(item: ir.Type, convert: Callable[[Any, Any], Any], kind: Any, n: int = LANES) -> Any:
    """An intrinsic that writes `n` items at an index."""

    @intrinsic
    def store(typing: Typing, base: Kind, index: Kind, value: Kind) -> Intrinsic:
        check_base(base)

        def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
            where = pointer(context, builder, signature.args[0], args[0], args[1], item, n)
            builder.store(convert(builder, args[2]), where, align=1)
            return context.get_dummy_value()

        return types.void(base, types.intp, kind), generate

    return store


load_f32 = _loader(f32, _same, F32x16)
load_f16 = _loader(i16, _from_f16, F32x16)
load_bf16 = _loader(i16, _from_bf16, F32x16)
load_e4m3 = _loader(i8, _from_e4m3, F32x16)
load_e5m2 = _loader(i8, _from_e5m2, F32x16)
load_i8_as_f32 = _loader(i8, lambda b, x: b.sitofp(b.sext(x, lanes_of(i32)), lanes_of(f32)), F32x16)
load_u8 = _loader(i8, lambda b, x: b.zext(x, lanes_of(i32)), I32x16)
load_u16 = _loader(i16, lambda b, x: b.zext(x, lanes_of(i32)), I32x16)
load_i32 = _loader(i32, _same, I32x16)
"""Also 64 bytes of any kind, such as operands of `integer.dot_u8_i8`."""
load_mask = _loader(i16, lambda b, x: b.bitcast(x, Mask16.llvm), Mask16, 1)
"""Bit i of the 16-bit item decides lane i."""
broadcast_f32 = _loader(f32, splat, F32x16, 1)
"""One float in all lanes."""
broadcast_f16 = _loader(i16, lambda b, x: half_bits_to_float(b, splat(b, x)), F32x16, 1)
"""One half in all lanes, as a float."""
get_f16 = _loader(
    i16,
    lambda b, x: b.extract_element(half_bits_to_float(b, splat(b, x)), ir.Constant(i32, 0)),
    types.float32,
    1,
)
"""One half, as a float."""

store_f32 = _storer(f32, _same, F32x16)
store_i32 = _storer(i32, _same, I32x16)
store_low_bytes = _storer(i8, lambda b, x: b.trunc(x, lanes_of(i8)), I32x16)
"""The lowest byte of each lane."""
store_mask = _storer(i16, lambda b, x: b.bitcast(x, i16), Mask16, 1)
"""The inverse of `load_mask`: a 16-bit item."""


def _scalar(item: ir.Type, kind: Any) -> tuple[Any, Any]:
    """Load and store one item."""
    return _loader(item, _same, kind, 1), _storer(item, _same, kind, 1)


get_f32, put_f32 = _scalar(f32, types.float32)
get_u8, put_u8 = _scalar(i8, types.uint8)
get_u16, put_u16 = _scalar(i16, types.uint16)
get_i32, put_i32 = _scalar(i32, types.int32)
get_i64, put_i64 = _scalar(i64, types.int64)


@intrinsic
def load_nibbles(typing: Typing, base: Kind, index: Kind) -> Intrinsic:
    """8 bytes at `index`: their low nibbles in lanes 0 to 7, their high ones in lanes 8 to 15."""
    check_base(base)
    half = LANES // 2

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        where = pointer(context, builder, signature.args[0], args[0], args[1], i8)
        packed = builder.load(builder.bitcast(where, lanes_of(i8, half).as_pointer()), align=1)
        twice = ir.Constant(lanes_of(i32), [lane % half for lane in range(LANES)])
        words = builder.zext(builder.shuffle_vector(packed, packed, twice), lanes_of(i32))
        shifts = ir.Constant(lanes_of(i32), [0] * half + [4] * half)
        return builder.and_(builder.lshr(words, shifts), constant(i32, 15))

    return I32x16(base, types.intp), generate


@intrinsic
def store_nibbles(typing: Typing, base: Kind, index: Kind, value: Kind) -> Intrinsic:
    """The inverse of `load_nibbles`, of lanes from 0 to 15: 8 bytes at `index`."""
    check_base(base)
    half = LANES // 2

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        where = pointer(context, builder, signature.args[0], args[0], args[1], i8)
        low, high = (
            builder.shuffle_vector(
                x, x, ir.Constant(lanes_of(i32, half), list(range(first, first + half)))
            )
            for first, x in ((0, args[2]), (half, builder.shl(args[2], constant(i32, 4))))
        )
        packed = builder.trunc(builder.or_(low, high), lanes_of(i8, half))
        builder.store(packed, builder.bitcast(where, lanes_of(i8, half).as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(base, types.intp, I32x16), generate


def emit_prefetch(builder: Builder, where: Value, *, in_second: bool = False) -> None:
    """Ask for the cache line of an i8*, which need not be mapped, in the nearest cache, or in the
    second one."""
    read, locality, data = (ir.Constant(i32, x) for x in (0, 2 if in_second else 3, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [where, read, locality, data])


def emit_stream_prefetch(builder: Builder, where: Value) -> None:
    """Ask for what a stream, read from memory once, reaches some time after the line of an i8*."""
    requests = ((FAR_BYTES, False),) if IS_ZEN5 else ((FAR_BYTES, True), (NEAR_BYTES, False))
    for n_bytes, in_second in requests:
        ahead = builder.gep(where, [ir.Constant(i64, n_bytes)])
        emit_prefetch(builder, ahead, in_second=in_second)


@intrinsic
def prefetch(typing: Typing, base: Kind, index: Kind) -> Intrinsic:
    """Ask for the cache line of byte `index`, which need not be mapped."""
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        where = pointer(context, builder, signature.args[0], args[0], args[1], i8)
        emit_prefetch(builder, where)
        return context.get_dummy_value()

    return types.void(base, types.intp), generate


@intrinsic
def address(typing: Typing, array: Kind) -> Intrinsic:
    """Where an array's items start."""

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, i64)

    return types.int64(array), generate


@intrinsic
def call_address(typing: Typing, function: Kind, args: Kind) -> Intrinsic:
    """Call a C function, known by its address only, with a tuple of int64.

    Functions that are compiled separately work together like this: one per type, not one per pair.
    """

    def generate(context: Target, builder: Builder, signature: Signature, values: Value) -> Value:
        numbers = [builder.extract_value(values[1], i) for i in range(args.count)]
        kind = ir.FunctionType(ir.VoidType(), [i64] * args.count)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.int64, UniTuple(types.int64, args.count)), generate


@intrinsic
def take_next(typing: Typing, counter: Kind) -> Intrinsic:
    """Add 1 to the int64 at a base and return its value before: threads share out work with it.

    A thread's earlier writes are visible to those that add after it.
    """
    check_base(counter)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        zero = ir.Constant(i64, 0)
        where = pointer(context, builder, signature.args[0], args[0], zero, i64)
        return builder.atomic_rmw("add", where, ir.Constant(i64, 1), "acq_rel")

    return types.int64(counter), generate


@intrinsic(prefer_literal=True)
def get_i64s(typing: Typing, base: Kind, n: Kind) -> Intrinsic:
    """The first `n` int64 at a base, as a tuple; `n` is known when compiling."""
    check_base(base)
    if not isinstance(n, types.IntegerLiteral):
        raise RequireLiteralValue("the length of a tuple must be known when compiling")
    length = int(n.literal_value)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out = ir.Constant(ir.ArrayType(i64, length), ir.Undefined)
        for i in range(length):
            index = ir.Constant(i64, i)
            where = pointer(context, builder, signature.args[0], args[0], index, i64)
            out = builder.insert_value(out, builder.load(where, align=1), i)
        return out

    return UniTuple(types.int64, length)(base, n), generate


def reader(kind: type[tuple[Any, ...]]) -> Any:
    """A compiled function that reads named tuples of int64 of a kind, such as a worker's job.

    `read(address)` reads one, `read(address, index)` one of those that lie one after the other.
    """
    n_items = len(kind._fields)  # type: ignore[attr-defined]  # there is no type of named tuples

    @njit
    def read(address: Address, index: int = 0) -> Any:
        return kind(*get_i64s(address + 8 * n_items * index, n_items))

    return read
