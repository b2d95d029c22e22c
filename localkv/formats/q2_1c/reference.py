"""q2_1c: 2-bit codes, a scale and a minimum per channel of 32 tokens, `x = d q + m`."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.formats.bits import Bytes, Floats, pack_two_bits, two_bit_codes
from localkv.formats.channel_groups import affine_groups, scaled_codes


def decode(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16 of each channel), qs (8 bytes) -> float32 [..., tokens, n_blocks * 32]."""
    d, m, qs = planes
    return scaled_codes(two_bit_codes(qs), d, m)


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, m, qs (see `channel_groups.affine_groups`)."""
    d, m, codes = affine_groups(x, n_bits=2)
    return d, m, pack_two_bits(codes)
