"""Shuffles of vectors of 16 words of 4 bytes, for code that is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from localkv.simd.kinds import Builder, Value
from localkv.simd.lanes import LANES
from localkv.simd.vector import i32, lanes_of

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
