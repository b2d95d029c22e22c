"""q4_1c: 4-bit codes, a scale and a minimum per channel of 32 tokens, `x = d q + m`."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.formats.bits import Bytes, Floats, bit_fields, pack_bits
from localkv.formats.channel_groups import affine_groups, scaled_codes


def decode(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16 of each channel), qs (16 bytes) -> float32 [..., tokens, n_blocks * 32]."""
    d, m, qs = planes
    return scaled_codes(bit_fields(qs, n_bits=4, run=16), d, m)


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, m, qs (see `channel_groups.affine_groups`)."""
    d, m, codes = affine_groups(x, n_bits=4)
    return d, m, pack_bits(codes, n_bits=4, run=16)
