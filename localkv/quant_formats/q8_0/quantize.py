"""q8_0 of sixteen rows at a time, as ggml's `quantize_row_q8_0_ref`; importance changes nothing."""

from __future__ import annotations

import numpy as np
from numba import njit

from localkv.quant_formats.shared.cpu.quantizing import (
    extreme,
    floats,
    half_bits,
    inverse,
    put_code,
    put_half,
    rounded,
)
from localkv.simd.arithmetic import div, f32x16, mul
from localkv.simd.kinds import Address, Lanes


@njit
def encode(
    x: Address, importance: Address, mean: Lanes, out: Address, scratch: Address, table: Address
) -> None:
    _, size = extreme(32, x)
    d = div(size, f32x16(np.float32(127)))
    put_half(out, 0, half_bits(d))
    factor = inverse(d)
    for i in range(32):
        put_code(out, 2 + i, rounded(mul(floats(x, i), factor)))


encode_weighted = encode
