"""The Hadamard transform of rows in memory, with the sums of the reference, bit for bit."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from localkv.simd.arithmetic import add, f32x16, mul, sub
from localkv.simd.kinds import (
    Address,
    Args,
    Builder,
    Float,
    Intrinsic,
    Kind,
    Signature,
    Target,
    Typing,
    Value,
)
from localkv.simd.lanes import LANES
from localkv.simd.memory import get_f32, load_f32, put_f32, store_f32
from localkv.simd.vector import F32x16, i1, i32, lanes_of


@intrinsic(prefer_literal=True)
def butterfly(typing: Typing, x: Kind, distance: Kind) -> Intrinsic:
    """Sums and differences of lanes that are `distance` (1, 2, 4 or 8) apart."""
    apart = distance.literal_value

    def generate(context: Target, b: Builder, signature: Signature, args: Args) -> Value:
        partners = ir.Constant(lanes_of(i32), [lane ^ apart for lane in range(LANES)])
        partner = b.shuffle_vector(args[0], args[0], partners)
        upper = ir.Constant(lanes_of(i1), [int(lane & apart > 0) for lane in range(LANES)])
        return b.select(upper, b.fsub(partner, args[0]), b.fadd(args[0], partner))

    return F32x16(F32x16, distance), generate


@njit
def rotate_short(x: Address, out: Address, block: int, factor: Float) -> None:
    """A block of less than a vector's lanes; `out` may be `x`."""
    for i in range(block):
        put_f32(out, i, get_f32(x, i))
    apart = 1
    while apart < block:
        for i in range(block):
            if i & apart == 0:
                a, b = get_f32(out, i), get_f32(out, i + apart)
                put_f32(out, i, a + b)
                put_f32(out, i + apart, a - b)
        apart *= 2
    for i in range(block):
        put_f32(out, i, get_f32(out, i) * factor)


@njit
def rotate_block(x: Address, out: Address, block: int) -> None:
    """Transform `block` floats, a power of two; `out` may be `x`."""
    factor = np.float32(1 / np.sqrt(np.float64(block)))
    if block < LANES:
        rotate_short(x, out, block, factor)
        return
    for i in range(0, block, LANES):
        v = butterfly(butterfly(butterfly(butterfly(load_f32(x, i), 1), 2), 4), 8)
        store_f32(out, i, v)
    apart = LANES
    while apart < block:
        for i in range(0, block, LANES):
            if i & apart == 0:
                a, b = load_f32(out, i), load_f32(out, i + apart)
                store_f32(out, i, add(a, b))
                store_f32(out, i + apart, sub(a, b))
        apart *= 2
    factors = f32x16(factor)
    for i in range(0, block, LANES):
        store_f32(out, i, mul(load_f32(out, i), factors))
