"""A few rows of 16 floats each as columns, and the other way round."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.shuffle import QUARTER, in_quarters, shuffled
from localkv.simd.vector import check_base, f32, lanes_of, pointer

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
