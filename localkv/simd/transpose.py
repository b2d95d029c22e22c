"""Transposition of 16 rows of 4-byte words."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from localkv.simd.vector import LANES, i32, lanes_of, pointer, splat

QUARTER = 4
"""Words of a row that go together: what the smallest vector holds."""


def _shuffle_quarters(builder: Any, x: Any, y: Any, items: tuple[int, ...]) -> Any:
    """In each quarter of the result the same items: 0 to 3 of x's quarter, 4 to 7 of y's."""
    mask = [
        start + (item if item < QUARTER else LANES + item - QUARTER)
        for start in range(0, LANES, QUARTER)
        for item in items
    ]
    return builder.shuffle_vector(x, y, ir.Constant(lanes_of(i32), mask))


def _joined(builder: Any, quarters: list[Any]) -> Any:
    """Four <4 x i32> as one <16 x i32>."""
    while len(quarters) > 1:
        n = 2 * quarters[0].type.count
        mask = ir.Constant(lanes_of(i32, n), list(range(n)))
        quarters = [
            builder.shuffle_vector(x, y, mask)
            for x, y in zip(quarters[::2], quarters[1::2], strict=True)
        ]
    return quarters[0]


@intrinsic
def transpose_words(typing: Any, rows: Any, stride: Any, goal: Any, flip: Any) -> Any:
    """Words 0 to 3 of 16 rows become 4 vectors at `goal`: word 0 of all rows, word 1, ...

    `rows`, `goal` are addresses, `stride` counts bytes, and every word is xored with `flip`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, stride, goal, flip = args
        kinds = signature.args

        def row(lane: int) -> Any:
            offset = builder.mul(stride, ir.Constant(stride.type, lane))
            where = pointer(context, builder, kinds[0], rows, offset, ir.IntType(8))
            return builder.load(builder.bitcast(where, lanes_of(i32, 4).as_pointer()), align=1)

        # w[j]: rows j, 4 + j, 8 + j and 12 + j, one in each quarter
        w = [
            _joined(builder, [row(j + start) for start in range(0, LANES, QUARTER)])
            for j in range(QUARTER)
        ]
        low, high = (0, 4, 1, 5), (2, 6, 3, 7)
        pairs = [
            [_shuffle_quarters(builder, w[j], w[j + 1], half) for j in (0, 2)]
            for half in (low, high)
        ]
        flips = splat(builder, flip)
        word = 0
        for x, y in pairs:
            for items in ((0, 1, 4, 5), (2, 3, 6, 7)):
                out = builder.xor(_shuffle_quarters(builder, x, y, items), flips)
                index = ir.Constant(stride.type, LANES * word)
                where = pointer(context, builder, kinds[2], goal, index, i32, LANES)
                builder.store(out, where, align=1)
                word += 1
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int32), generate
