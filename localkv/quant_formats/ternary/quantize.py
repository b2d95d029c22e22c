"""Types of one bit, of two, and of three levels, of sixteen rows at a time, as ggml does.

See `quantize_row_q1_0_ref` and its like in ggml-quants.c. Importance changes nothing.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import njit

from localkv.quant_formats.shared.cpu.quantizing import (
    clamped,
    extreme,
    floats,
    half_bits,
    integers,
    inverse,
    or_i32,
    put_code,
    put_half,
    rounded,
    shifted_left,
)
from localkv.simd import LANES
from localkv.simd.arithmetic import (
    absolute,
    add,
    at_least,
    div,
    f32x16,
    mul,
    select_i32,
    zero_f32,
    zero_i32,
)
from localkv.simd.integer import add_i32, and_i32, mul_i32
from localkv.simd.kinds import Address, Lanes
from localkv.simd.vector import I32x16, constant, i32, lanewise

_fifths = lanewise(lambda b, x: b.udiv(x, constant(i32, 243)), [I32x16], I32x16)


@njit
def level(x: Address, i: int, factor: Lanes) -> Lanes:
    """The rounded value plus 1."""
    return add_i32(rounded(mul(floats(x, i), factor)), integers(1))


@njit
def encode_q1_0(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    total = zero_f32()
    for i in range(128):
        total = add(total, absolute(floats(x, i)))
    put_half(out, 0, half_bits(div(total, f32x16(np.float32(128)))))
    for byte in range(16):
        bits = zero_i32()
        for i in range(8):
            is_set = at_least(floats(x, 8 * byte + i), zero_f32())
            bits = or_i32(bits, select_i32(is_set, integers(1 << i), zero_i32()))
        put_code(out, 2 + byte, bits)


@njit
def encode_q2_0(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    _, d = extreme(64, x)
    put_half(out, 0, half_bits(d))
    factor = inverse(d)
    for byte in range(16):
        bits = zero_i32()
        for i in range(4):
            q = clamped(level(x, 4 * byte + i, factor), 0, 3)
            bits = or_i32(bits, shifted_left(q, 2 * i))
        put_code(out, 2 + byte, bits)


@njit
def encode_tq2_0(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    _, d = extreme(256, x)
    put_half(out, 64, half_bits(d))
    factor = inverse(d)
    for half in range(2):
        for byte in range(32):
            bits = zero_i32()
            for i in range(4):
                q = and_i32(level(x, 128 * half + 32 * i + byte, factor), integers(3))
                bits = or_i32(bits, shifted_left(q, 2 * i))
            put_code(out, 32 * half + byte, bits)


@njit
def put_trits(
    x: Address, factor: Lanes, n: int, step: int, fill: int, out: Address, i: int
) -> None:
    """n values, `step` apart, and `fill` zeros as the digits of a byte, a fraction of 243."""
    digits = zero_i32()
    for j in range(n):
        digits = add_i32(mul_i32(digits, integers(3)), level(x, step * j, factor))
    for _ in range(fill):
        digits = mul_i32(digits, integers(3))
    digits = and_i32(digits, integers(255))
    put_code(out, i, _fifths(add_i32(shifted_left(digits, 8), integers(242))))


@njit
def encode_tq1_0(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    _, d = extreme(256, x)
    put_half(out, 52, half_bits(d))
    factor = inverse(d)
    for i in range(32):
        put_trits(x + 4 * LANES * i, factor, 5, 32, 0, out, i)
    for i in range(16):
        put_trits(x + 4 * LANES * (160 + i), factor, 5, 16, 0, out, 32 + i)
    for i in range(4):
        put_trits(x + 4 * LANES * (240 + i), factor, 4, 4, 1, out, 48 + i)


q1_0 = SimpleNamespace(encode=encode_q1_0, encode_weighted=encode_q1_0)
q2_0 = SimpleNamespace(encode=encode_q2_0, encode_weighted=encode_q2_0)
tq1_0 = SimpleNamespace(encode=encode_tq1_0, encode_weighted=encode_tq1_0)
tq2_0 = SimpleNamespace(encode=encode_tq2_0, encode_weighted=encode_tq2_0)
