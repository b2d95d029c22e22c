"""q3_0: 3-bit codes and a scale, `x = d (q - 4)`.

Bits 0 and 1 of the codes are in `qs` (`bits.two_bit_codes`), bit 2 of code i is bit i of `qh`.

The largest magnitude has code 0, as in `q4_0`; then the scale becomes the one of the least squared
error. A grid with a step around 0 instead, as `q2_0` has, would be off by a twentieth more or
less, but by 2.6 times as much where there are outliers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.quant_formats.shared.bits import (
    Bytes,
    Floats,
    bit_fields,
    half,
    half_bytes,
    ieee,
    less,
    pack_bits,
    pack_two_bits,
    scaled,
    two_bit_codes,
)
from localkv.quant_formats.shared.cpu.page_order import SCALES, TWO_BITS, codes
from localkv.quant_formats.shared.rounding import F16_LIMIT, blocks, fitted_scale, symmetric_codes

LIMIT = 4 * F16_LIMIT
"""The largest value that a scale reaches."""


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qh (32 bits), qs (8 bytes) -> float32 [..., n_blocks * 32]."""
    d, qh, qs = planes
    codes = two_bit_codes(qs) | (bit_fields(qh, n_bits=1, run=1) << 2)
    return scaled(less(codes, 4), half(d))


@ieee
def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, qh, qs."""
    x = np.clip(blocks(x, 32), -LIMIT, LIMIT)
    d, codes = symmetric_codes(x, n_bits=3)
    q = codes.astype(np.float32) - 4
    d = fitted_scale(x * q, q * q, d)
    return half_bytes(d), pack_bits(codes >> 2, n_bits=1, run=1), pack_two_bits(codes & 3)


# how the CPU lays it out; see `shared/cpu`
BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (SCALES, codes(1, rows=2, unit_items=2), TWO_BITS)
OFFSET = 4
