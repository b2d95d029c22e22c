"""q3_1c: 3-bit codes, a scale and a minimum per channel of 32 tokens, `x = d q + m`.

Bits 0 and 1 of the codes are in `qs`, bit 2 of code i is bit i of `qh`.
"""

from __future__ import annotations

from collections.abc import Sequence

from localkv.formats.bits import (
    Bytes,
    Floats,
    bit_fields,
    pack_bits,
    pack_two_bits,
    two_bit_codes,
)
from localkv.formats.channel_groups import affine_groups, scaled_codes


def decode(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16 of each channel), qh (32 bits), qs (8 bytes) -> float32 [..., tokens, n]."""
    d, m, qh, qs = planes
    codes = two_bit_codes(qs) | (bit_fields(qh, n_bits=1, run=1) << 2)
    return scaled_codes(codes, d, m)


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, m, qh, qs (see `channel_groups.affine_groups`)."""
    d, m, codes = affine_groups(x, n_bits=3)
    qh = pack_bits(codes >> 2, n_bits=1, run=1)
    return d, m, qh, pack_two_bits(codes & 3)
