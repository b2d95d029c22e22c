"""mxfp4 and nvfp4 of sixteen rows at a time, as ggml's `quantize_row_mxfp4_ref` and `nvfp4` do.

Importance changes nothing. mxfp4's exponent is that of the largest magnitude as `floorf(log2f(x))`
gives it: the logarithm of a float just below a power of two is rounded up to a whole number.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import njit

from localkv.quant_formats.fp4 import TWICE
from localkv.quant_formats.shared.cpu.quantizing import (
    CODES,
    HALF,
    above,
    above_i32,
    extreme,
    floats,
    integers,
    least_i32,
    or_i32,
    put_code,
    put_nibbles,
    shifted_left,
    shifted_right,
    sub_i32,
)
from localkv.simd import LANES
from localkv.simd.arithmetic import (
    add,
    div,
    f32x16,
    mul,
    select,
    select_i32,
    to_f32,
    to_i32,
    zero_f32,
    zero_i32,
)
from localkv.simd.integer import add_i32, and_i32
from localkv.simd.kinds import Address, Builder, Lanes, Value
from localkv.simd.memory import get_i32, load_i32, put_i32, store_i32
from localkv.simd.vector import F32x16, I32x16, call, constant, f32, i32, lanes_of, lanewise


def _nearest_code(b: Builder, x: Value, d: Value) -> Value:
    """The code of the value nearest to x with a scale; the first of several."""
    best, least = constant(i32, 0), None
    for i, twice in enumerate(TWICE):
        error = b.fsub(b.fmul(constant(f32, float(twice)), d), x)
        error = call(b, "llvm.fabs.v16f32", lanes_of(f32), [error])
        if least is None:
            least = error
            continue
        is_less = b.fcmp_ordered("<", error, least)
        best = b.select(is_less, constant(i32, i), best)
        least = b.select(is_less, error, least)
    return best


nearest_code = lanewise(_nearest_code, [F32x16, F32x16], I32x16)
bits_of = lanewise(lambda b, x: b.bitcast(x, lanes_of(i32)), [F32x16], I32x16)
of_bits = lanewise(lambda b, x: b.bitcast(x, lanes_of(f32)), [I32x16], F32x16)


@njit
def encode_mxfp4(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    _, size = extreme(32, x)
    store_i32(scratch, 0, bits_of(size))
    for lane in range(LANES):
        bits = get_i32(scratch, lane)
        exponent = bits >> 23
        if bits >= get_i32(table, exponent):
            exponent += 1
        put_i32(scratch, lane, max(exponent - 2, 0))
    e = select_i32(above(size, zero_f32()), load_i32(scratch, 0), zero_i32())
    small = integers(0x00200000)
    first = select_i32(above_i32(e, zero_i32()), shifted_left(small, 1), small)
    normal = shifted_left(sub_i32(e, integers(1)), 23)
    d = of_bits(select_i32(above_i32(e, integers(1)), normal, first))
    put_code(out, 0, e)
    for i in range(32):
        put_code(scratch + CODES, i, nearest_code(floats(x, i), d))
    put_nibbles(scratch + CODES, out + LANES, 16, 16)


@njit
def small_float(x: Lanes) -> Lanes:
    """The code of an E4M3 number that is not negative, as ggml's `ggml_fp32_to_ue4m3` rounds."""
    x = select(above(x, f32x16(np.float32(448))), f32x16(np.float32(448)), x)
    bits = bits_of(x)
    exponent = sub_i32(shifted_right(bits, 23), integers(120))
    tiny = to_i32(add(mul(x, f32x16(np.float32(512))), f32x16(HALF)))
    tiny = least_i32(tiny, integers(7))
    round_up = and_i32(shifted_right(bits, 19), integers(1))
    mantissa = add_i32(and_i32(shifted_right(bits, 20), integers(7)), round_up)
    # a mantissa of 8 carries into the exponent
    normal = add_i32(shifted_left(exponent, 3), mantissa)
    normal = least_i32(normal, integers(0x7E))
    normal = select_i32(above_i32(exponent, integers(14)), integers(0x7E), normal)
    chosen = select_i32(above_i32(exponent, zero_i32()), normal, tiny)
    return select_i32(above(x, zero_f32()), chosen, zero_i32())


@njit
def half_of_small_float(q: Lanes) -> Lanes:
    exponent, mantissa = shifted_right(q, 3), and_i32(q, integers(7))
    tiny = mul(to_f32(mantissa), f32x16(np.float32(2.0**-10)))
    bits = or_i32(shifted_left(add_i32(exponent, integers(119)), 23), shifted_left(mantissa, 20))
    return select(above(to_f32(exponent), zero_f32()), of_bits(bits), tiny)


@njit
def encode_nvfp4(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    for j in range(4):
        group = x + 4 * LANES * 16 * j
        _, size = extreme(16, group)
        q = small_float(div(size, f32x16(np.float32(6))))
        put_code(out, j, q)
        d = half_of_small_float(q)
        for i in range(16):
            put_code(scratch + CODES, i, nearest_code(floats(group, i), d))
        put_nibbles(scratch + CODES, out + LANES * (4 + 8 * j), 8, 8)


mxfp4 = SimpleNamespace(encode=encode_mxfp4, encode_weighted=encode_mxfp4)
nvfp4 = SimpleNamespace(encode=encode_nvfp4, encode_weighted=encode_nvfp4)
