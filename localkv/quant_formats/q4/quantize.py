"""q4_0 and q4_1 of sixteen rows at a time, as ggml's `quantize_row_q4_*_ref` and `_impl` do."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import njit

from localkv.quant_formats.shared.cpu.quantizing import (
    CODES,
    affine_scale,
    code_affinely,
    code_symmetrically,
    half_bits,
    put_half,
    put_nibbles,
    symmetric_scale,
    weigh,
)
from localkv.simd import LANES
from localkv.simd.arithmetic import f32x16, mul
from localkv.simd.kinds import Address, Lanes


@njit
def encode_q4_0(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    put_half(out, 0, half_bits(code_symmetrically(x, 8, scratch + CODES)))
    put_nibbles(scratch + CODES, out + LANES * 2, 16, 16)


@njit
def encode_weighted_q4_0(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    weigh(32, x, importance, mean, scratch)
    put_half(out, 0, half_bits(symmetric_scale(32, 8, x, scratch, scratch + CODES)))
    put_nibbles(scratch + CODES, out + LANES * 2, 16, 16)


@njit
def encode_q4_1(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    d, low = code_affinely(x, 15, scratch + CODES)
    put_half(out, 0, half_bits(d))
    put_half(out, 2, half_bits(low))
    put_nibbles(scratch + CODES, out + LANES * 4, 16, 16)


@njit
def encode_weighted_q4_1(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    weigh(32, x, importance, mean, scratch)
    d, minimum = affine_scale(32, 15, x, scratch, scratch + CODES, -0.9, 0.05, 36, False)
    put_half(out, 0, half_bits(d))
    put_half(out, 2, half_bits(mul(f32x16(np.float32(-1)), minimum)))
    put_nibbles(scratch + CODES, out + LANES * 4, 16, 16)


q4_0 = SimpleNamespace(encode=encode_q4_0, encode_weighted=encode_weighted_q4_0)
q4_1 = SimpleNamespace(encode=encode_q4_1, encode_weighted=encode_weighted_q4_1)
