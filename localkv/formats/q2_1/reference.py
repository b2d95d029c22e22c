"""q2_1: 2-bit codes, a scale and a minimum, `x = d q + m`: `q4_1` with fewer bits.

The rounding is that of KIVI's values (arXiv:2402.02750): from the smallest to the largest value of
32 channels of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

from localkv.formats.bits import (
    Bytes,
    Floats,
    half,
    half_bytes,
    pack_two_bits,
    scaled,
    two_bit_codes,
)
from localkv.formats.rounding import affine_codes, blocks


def decode(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16), qs (8 bytes) -> float32 [..., n_blocks * 32]."""
    d, m, qs = planes
    return scaled(two_bit_codes(qs), half(d), minimum=-half(m))


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, m, qs."""
    d, m, codes = affine_codes(blocks(x, 32), n_bits=2)
    return half_bytes(d), half_bytes(m), pack_two_bits(codes)
