"""q5_0 and q5_1 of sixteen rows at a time, as ggml's `quantize_row_q5_*_ref` and `_impl` do."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import njit

from localkv.quant_formats.shared.cpu.quantizing import (
    CODES,
    affine_scale,
    code,
    code_affinely,
    code_symmetrically,
    half_bits,
    integers,
    or_i32,
    put_code,
    put_half,
    put_nibbles,
    shifted_left,
    shifted_right,
    symmetric_scale,
    weigh,
)
from localkv.simd import LANES
from localkv.simd.arithmetic import f32x16, mul, zero_i32
from localkv.simd.integer import and_i32
from localkv.simd.kinds import Address, Lanes


@njit
def put_five_bits(codes: Address, out: Address) -> None:
    """4 bytes of the upper bits of 32 codes, and 16 bytes of the lower ones."""
    for byte in range(4):
        upper = zero_i32()
        for i in range(8):
            bit = shifted_right(code(codes, 8 * byte + i), 4)
            upper = or_i32(upper, shifted_left(bit, i))
        put_code(out, byte, upper)
    for i in range(32):
        put_code(codes, i, and_i32(code(codes, i), integers(15)))
    put_nibbles(codes, out + LANES * 4, 16, 16)


@njit
def encode_q5_0(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    put_half(out, 0, half_bits(code_symmetrically(x, 16, scratch + CODES)))
    put_five_bits(scratch + CODES, out + LANES * 2)


@njit
def encode_weighted_q5_0(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    weigh(32, x, importance, mean, scratch)
    put_half(out, 0, half_bits(symmetric_scale(32, 16, x, scratch, scratch + CODES)))
    put_five_bits(scratch + CODES, out + LANES * 2)


@njit
def encode_q5_1(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    d, low = code_affinely(x, 31, scratch + CODES)
    put_half(out, 0, half_bits(d))
    put_half(out, 2, half_bits(low))
    put_five_bits(scratch + CODES, out + LANES * 4)


@njit
def encode_weighted_q5_1(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    weigh(32, x, importance, mean, scratch)
    d, minimum = affine_scale(32, 31, x, scratch, scratch + CODES, -0.9, 0.05, 36, False)
    put_half(out, 0, half_bits(d))
    put_half(out, 2, half_bits(mul(f32x16(np.float32(-1)), minimum)))
    put_five_bits(scratch + CODES, out + LANES * 4)


q5_0 = SimpleNamespace(encode=encode_q5_0, encode_weighted=encode_weighted_q5_0)
q5_1 = SimpleNamespace(encode=encode_q5_1, encode_weighted=encode_weighted_q5_1)
