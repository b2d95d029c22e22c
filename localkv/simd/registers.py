"""Instructions of one CPU, on vectors that its registers may be too narrow for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from localkv.simd.cpu_features import REGISTER_BYTES
from localkv.simd.kinds import Builder, Value
from localkv.simd.lanes import LANES
from localkv.simd.shuffle import joined
from localkv.simd.vector import i8, i32, lanes_of

VECTOR_BYTES = 4 * LANES


def as_bytes(builder: Builder, x: Value) -> Value:
    """A vector's bytes, from the first lane's lowest one on."""
    n = x.type.count * x.type.element.width // 8
    return builder.bitcast(x, lanes_of(i8, n))


def as_words(builder: Builder, x: Value) -> Value:
    """The same as words of 4 bytes."""
    n = x.type.count * x.type.element.width // 32
    return builder.bitcast(x, lanes_of(i32, n))


def by_register(builder: Builder, instruction: Callable[..., Any], *vectors: Value) -> Value:
    """A vector of words that an instruction makes of such vectors, a register at a time."""
    n = REGISTER_BYTES // 4
    if n == LANES:
        return instruction(*vectors)
    parts = []
    for start in range(0, LANES, n):
        order = ir.Constant(lanes_of(i32, n), list(range(start, start + n)))
        parts.append(instruction(*(builder.shuffle_vector(x, x, order) for x in vectors)))
    return joined(builder, parts)
