"""Rows of floats on their way to digit rows (`simd/quads.py`), some rows at a time.

Rows are at index + i * stride, and all are multiplied with the same vectors first: weights of the
tokens of a page, which are multiplied with scales of V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from localkv.simd.arithmetic import folded, larger_magnitude, nearest_integers
from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.quads import BYTES, DIGITS, QUAD, ROW_DIGITS
from localkv.simd.vector import (
    F32x16,
    I32x16,
    check_base,
    constant,
    f32,
    i8,
    i32,
    lanes_of,
    literal_length,
    pointer,
    splat,
)


def _row(context: Target, builder: Builder, kind: Kind, base: Value, index: Value) -> Value:
    where = pointer(context, builder, kind, base, index, f32, LANES)
    return builder.load(where, align=1)


@intrinsic
def larger_products(
    typing: Typing, largest: Kind, base: Kind, index: Kind, stride: Kind, v: Kind
) -> Intrinsic:
    """The larger of |x v| and largest[i] of each row's 16 floats x; NaN of NaN."""
    check_base(base)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, array, index, stride, v = args
        for i in range(largest.count):
            x = builder.fmul(_row(context, builder, base, array, index), v)
            x = larger_magnitude(builder, x, builder.extract_value(out, i))
            out = builder.insert_value(out, x, i)
            index = builder.add(index, stride)
        return out

    return largest(largest, base, types.intp, types.intp, F32x16), generate


def _folding(combine: Callable[[Any, Any, Any], Any], item: Any) -> Any:
    @intrinsic
    def put(typing: Typing, base: Kind, index: Kind, stride: Kind, x: Kind) -> Intrinsic:
        check_base(base)

        def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
            array, index, stride, vectors = args
            for i in range(x.count):
                value = folded(builder, builder.extract_value(vectors, i), combine)
                where = pointer(context, builder, base, array, index, item)
                builder.store(value, where, align=1)
                index = builder.add(index, stride)
            return context.get_dummy_value()

        return types.void(base, types.intp, types.intp, x), generate

    return put


put_largest = _folding(larger_magnitude, f32)
"""The word at index + i * stride = the largest lane of x[i], of floats that are not negative; NaN
of NaN."""
put_sums = _folding(lambda builder, x, y: builder.add(x, y), i32)
"""The same of the sum of the lanes of integers."""
put_float_sums = _folding(lambda builder, x, y: builder.fadd(x, y), f32)
"""The same of floats."""


@intrinsic(prefer_literal=True)
def zeros_i32(typing: Typing, n: Kind) -> Intrinsic:
    length = literal_length(n)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        kind = ir.ArrayType(lanes_of(i32), length)
        return ir.Constant(kind, [constant(i32, 0)] * length)

    return UniTuple(I32x16, length)(n), generate


def _store_digits(
    context: Target, builder: Builder, kind: Kind, base: Value, index: Value, n: list[Any]
) -> None:
    """The digits of 64 integers, four vectors of them, at word `index` of a digit row."""
    # with 128 added to the lower digit, that one and the higher one are the bytes of 16 bits
    halves = []
    for i in (0, 2):
        first, second = (builder.add(x, constant(i32, 128)) for x in n[i : i + 2])
        second = builder.shl(second, constant(i32, 16))
        first = builder.and_(first, constant(i32, 0xFFFF))
        halves.append(builder.bitcast(builder.or_(first, second), lanes_of(i8, BYTES)))
    for digit in range(DIGITS):
        # of a half, token t < 16 is in the lower two bytes of word t, 16 + t in the upper two
        places = [
            half * BYTES + t % LANES * 4 + t // LANES * 2 + 1 - digit
            for half in range(2)
            for t in range(2 * LANES)
        ]
        order = ir.Constant(lanes_of(i32, BYTES), places)
        out = builder.shuffle_vector(*halves, order)
        if digit:
            out = builder.xor(out, ir.Constant(lanes_of(i8, BYTES), [128] * BYTES))
        at = builder.add(index, ir.Constant(index.type, digit * ROW_DIGITS))
        where = pointer(context, builder, kind, base, at, i32, LANES)
        builder.store(builder.bitcast(out, I32x16.llvm), where, align=1)


@intrinsic
def split_rows(
    typing: Typing,
    sums: Kind,
    base: Kind,
    index: Kind,
    stride: Kind,
    vectors: Kind,
    digits: Kind,
    word: Kind,
    factor: Kind,
) -> Intrinsic:
    """Store the digits of n = round(x v factor), of 64 floats x of each row and four vectors v; add
    those integers to sums[i].

    Digits are stored from `word` on, of rows as far from each other as the others. There is the
    factor of each row, too: the float at word `factor`.
    """
    check_base(base)
    check_base(digits)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, array, index, stride, vectors, goal, word, place = args
        for i in range(sums.count):
            where = pointer(context, builder, digits, goal, place, f32)
            factor = splat(builder, builder.load(where, align=1))
            n = []
            for j in range(QUAD):
                at = builder.add(index, ir.Constant(index.type, LANES * j))
                x = _row(context, builder, base, array, at)
                x = builder.fmul(builder.fmul(x, builder.extract_value(vectors, j)), factor)
                n.append(nearest_integers(builder, x))
            _store_digits(context, builder, digits, goal, word, n)
            total = builder.add(builder.add(n[0], n[1]), builder.add(n[2], n[3]))
            total = builder.add(builder.extract_value(out, i), total)
            out = builder.insert_value(out, total, i)
            index, word, place = (builder.add(x, stride) for x in (index, word, place))
        return out

    given = (base, types.intp, types.intp, vectors, digits, types.intp, types.intp)
    return sums(sums, *given), generate


def _store_short_digits(
    context: Target,
    builder: Builder,
    kind: Kind,
    base: Value,
    index: Value,
    n: list[Any],
    words: int,
) -> None:
    """The digits of 32 integers, two vectors of them to which 128 was added, at word `index`."""
    second = builder.shl(n[1], constant(i32, 16))
    both = builder.or_(builder.and_(n[0], constant(i32, 0xFFFF)), second)
    data, half = builder.bitcast(both, lanes_of(i8, BYTES)), BYTES // 2
    for digit in range(DIGITS):
        # item i < 16 is in the lower two bytes of word i, 16 + i in the upper two
        places = [i % LANES * 4 + i // LANES * 2 + 1 - digit for i in range(half)]
        out = builder.shuffle_vector(data, data, ir.Constant(lanes_of(i32, half), places))
        if digit:
            out = builder.xor(out, ir.Constant(lanes_of(i8, half), [128] * half))
        at = builder.add(index, ir.Constant(index.type, digit * words))
        where = pointer(context, builder, kind, base, at, i32)
        where = builder.bitcast(where, lanes_of(i8, half).as_pointer())
        builder.store(out, where, align=1)


@intrinsic(prefer_literal=True)
def split_products(
    typing: Typing,
    sums: Kind,
    base: Kind,
    index: Kind,
    stride: Kind,
    vectors: Kind,
    digits: Kind,
    word: Kind,
    digit_stride: Kind,
    words: Kind,
    factor: Kind,
) -> Intrinsic:
    """Store the digits of n = round(x v factor), of 32 floats x of each row and two vectors v; add
    those integers to sums[i].

    Args:
        index, stride: where the floats are; row i's begin at index + i * stride.
        word, digit_stride: the same of digits, in words; the lower ones are `words` further.
        factor: where the first row's factor is, a float among the digits; the others' are as far
            from it as digits are.
    """
    check_base(base)
    check_base(digits)
    distance = literal_length(words)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        out, array, index, stride, vectors, goal, word, digit_stride, _, place = args
        for i in range(sums.count):
            where = pointer(context, builder, digits, goal, place, f32)
            times = splat(builder, builder.load(where, align=1))
            n, total = [], builder.extract_value(out, i)
            for j in range(2):
                at = builder.add(index, ir.Constant(index.type, LANES * j))
                x = _row(context, builder, base, array, at)
                x = builder.fmul(builder.fmul(x, builder.extract_value(vectors, j)), times)
                x = nearest_integers(builder, x)
                total = builder.add(total, x)
                n.append(builder.add(x, constant(i32, 128)))
            _store_short_digits(context, builder, digits, goal, word, n, distance)
            out = builder.insert_value(out, total, i)
            index = builder.add(index, stride)
            word, place = (builder.add(x, digit_stride) for x in (word, place))
        return out

    integer = types.intp
    given = (base, integer, integer, vectors, digits, integer, integer, words, integer)
    return sums(sums, *given), generate
