"""Transposition of 16 rows of 4-byte words, and of the bytes of a vector of them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from localkv.simd.kinds import Args, Builder, Intrinsic, Kind, Signature, Target, Typing, Value
from localkv.simd.lanes import LANES
from localkv.simd.shuffle import QUARTER, in_quarters, joined, shuffled
from localkv.simd.vector import I32x16, i8, i32, lanes_of, lanewise, pointer, splat

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
