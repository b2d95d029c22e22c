"""Transposition of 16 rows of 4-byte words."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.shuffle import QUARTER, in_quarters, joined, shuffled
from localkv.simd.vector import i32, lanes_of, pointer, splat


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
            where = pointer(context, builder, kinds[0], rows, offset, ir.IntType(8))
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
