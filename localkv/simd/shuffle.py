"""Shuffles and transpositions of vectors of 16 words of 4 bytes, for code that is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.vector import I32x16, check_base, f32, i8, i32, lanes_of, lanewise, pointer, splat

QUARTER = 4
"""Words that go together: those of the smallest vector."""


def shuffled(builder: Builder, x: Value, y: Value, mask: Sequence[int]) -> Value:
    """Words of x (0 to 15) and of y (from 16 on)."""
    return builder.shuffle_vector(x, y, ir.Constant(lanes_of(i32, len(mask)), list(mask)))


def in_quarters(items: Sequence[int]) -> list[int]:
    """A mask of the same items in each quarter: 0 to 3 of x's quarter, 4 to 7 of y's."""
    words = [item if item < QUARTER else LANES + item - QUARTER for item in items]
    return [start + word for start in range(0, LANES, QUARTER) for word in words]


def joined(builder: Builder, parts: Sequence[Any]) -> Value:
    """Two or four vectors of words as one, in that order."""
    while len(parts) > 1:
        n = 2 * parts[0].type.count
        parts = [
            shuffled(builder, x, y, range(n)) for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


WORD = 4
"""Bytes of one."""


@intrinsic
def transpose_words(typing: Typing, rows: Kind, stride: Kind, goal: Kind, flip: Kind) -> Intrinsic:
    """Words 0 to 3 of 16 rows become 4 vectors at `goal`: word 0 of all rows, word 1, ...

    `rows`, `goal` are addresses, `stride` counts bytes, and every word is xored with `flip`.
    """

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        rows, stride, goal, flip = args
        kinds = signature.args

        def row(lane: int) -> Any:
            offset = builder.mul(stride, ir.Constant(stride.type, lane))
            where = pointer(context, builder, kinds[0], rows, offset, i8)
            return builder.load(builder.bitcast(where, lanes_of(i32, 4).as_pointer()), align=1)

        # w[j]: rows j, 4 + j, 8 + j and 12 + j, one in each quarter
        w = [
            joined(builder, [row(j + start) for start in range(0, LANES, QUARTER)])
            for j in range(QUARTER)
        ]
        low, high = (0, 4, 1, 5), (2, 6, 3, 7)
        pairs = [
            [shuffled(builder, w[j], w[j + 1], in_quarters(half)) for j in (0, 2)]
            for half in (low, high)
        ]
        flips = splat(builder, flip)
        word = 0
        for x, y in pairs:
            for items in ((0, 1, 4, 5), (2, 3, 6, 7)):
                out = builder.xor(shuffled(builder, x, y, in_quarters(items)), flips)
                index = ir.Constant(stride.type, LANES * word)
                where = pointer(context, builder, kinds[2], goal, index, i32, LANES)
                builder.store(out, where, align=1)
                word += 1
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int32), generate


@intrinsic
def load_column(typing: Typing, rows: Kind, stride: Kind) -> Intrinsic:
    """A word of each of 16 rows, `stride` bytes apart, as a vector."""

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        rows, stride = args
        vector = ir.Constant(lanes_of(i32), ir.Undefined)
        for lane in range(LANES):
            offset = builder.mul(stride, ir.Constant(stride.type, lane))
            where = pointer(context, builder, signature.args[0], rows, offset, i8)
            word = builder.load(builder.bitcast(where, i32.as_pointer()), align=1)
            vector = builder.insert_element(vector, word, ir.Constant(i32, lane))
        return vector

    return I32x16(types.int64, types.int64), generate


def _bytes_apart(builder: Builder, words: Value) -> Value:
    order = [WORD * lane + byte for byte in range(WORD) for lane in range(LANES)]
    kind = lanes_of(i8, WORD * LANES)
    items = builder.bitcast(words, kind)
    mask = ir.Constant(lanes_of(i32, WORD * LANES), order)
    return builder.bitcast(builder.shuffle_vector(items, items, mask), words.type)


bytes_apart = lanewise(_bytes_apart, [I32x16], I32x16)
"""The lowest bytes of all lanes, then the second lowest ones, ..."""


_LOW, _HIGH = in_quarters((0, 4, 1, 5)), in_quarters((2, 6, 3, 7))
_LOW_PAIRS, _HIGH_PAIRS = in_quarters((0, 1, 4, 5)), in_quarters((2, 3, 6, 7))


def _quarters(*quarters: int) -> list[int]:
    """A mask of whole quarters: 0 to 3 of x, 4 to 7 of y."""
    return [quarter * QUARTER + word for quarter in quarters for word in range(QUARTER)]


def _turned(builder: Builder, rows: list[Any]) -> list[Any]:
    """Vector j is word j of each of 16 rows: words within quarters first, then the quarters."""
    out: list[Any] = [None] * LANES
    quads = []
    for first in range(0, LANES, QUARTER):
        a, b, c, d = rows[first : first + QUARTER]
        mixed = [shuffled(builder, x, y, m) for m in (_LOW, _HIGH) for x, y in ((a, b), (c, d))]
        # quads[g][w]: in quarter j word 4 j + w of rows 4 g to 4 g + 3
        quads.append(
            [
                shuffled(builder, mixed[half], mixed[half + 1], pairs)
                for half in (0, 2)
                for pairs in (_LOW_PAIRS, _HIGH_PAIRS)
            ]
        )
    for word in range(QUARTER):
        a, b, c, d = (quad[word] for quad in quads)
        for half in (0, 1):
            # quarters `half` and `half + 2` of rows 0 to 7 and of rows 8 to 15
            x = shuffled(builder, a, b, _quarters(half, half + 4, half + 2, half + 6))
            y = shuffled(builder, c, d, _quarters(half, half + 4, half + 2, half + 6))
            out[QUARTER * half + word] = shuffled(builder, x, y, _quarters(0, 1, 4, 5))
            out[QUARTER * (half + 2) + word] = shuffled(builder, x, y, _quarters(2, 3, 6, 7))
    return out


@intrinsic
def turn_rows(typing: Typing, base: Kind, stride: Kind, like: Kind, goal: Kind) -> Intrinsic:
    """16 vectors at `goal`: floats 0 of as many rows as `like` has vectors, floats 1, ...

    Rows are `stride` floats apart; lanes beyond them are arbitrary.
    """
    check_base(base)
    check_base(goal)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        rows: list[Any] = []
        index = ir.Constant(args[1].type, 0)
        for _ in range(like.count):
            where = pointer(context, builder, signature.args[0], args[0], index, f32, LANES)
            rows.append(builder.load(where, align=4))
            index = builder.add(index, args[1])
        rows += [ir.Constant(lanes_of(f32), 0)] * (LANES - len(rows))
        for i, column in enumerate(_turned(builder, rows)):
            at = ir.Constant(args[1].type, i * LANES)
            where = pointer(context, builder, signature.args[3], args[3], at, f32, LANES)
            builder.store(column, where, align=4)
        return context.get_dummy_value()

    return types.void(base, types.intp, like, goal), generate


@intrinsic
def add_turned_rows(
    typing: Typing, base: Kind, stride: Kind, like: Kind, source: Kind
) -> Intrinsic:
    """Add 16 vectors at `source` to rows: lane i of vector j to float j of row i."""
    check_base(base)
    check_base(source)

    def generate(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        vectors = []
        for i in range(LANES):
            at = ir.Constant(args[1].type, i * LANES)
            where = pointer(context, builder, signature.args[3], args[3], at, f32, LANES)
            vectors.append(builder.load(where, align=4))
        turned = _turned(builder, vectors)
        index = ir.Constant(args[1].type, 0)
        for i in range(like.count):
            where = pointer(context, builder, signature.args[0], args[0], index, f32, LANES)
            builder.store(builder.fadd(builder.load(where, align=4), turned[i]), where, align=4)
            index = builder.add(index, args[1])
        return context.get_dummy_value()

    return types.void(base, types.intp, like, source), generate
