"""q2_1: 2-bit codes, a scale and a minimum, `x = d q + m`: `q4_1` with fewer bits.

Rounding is as for KIVI's values (arXiv:2402.02750): from the smallest to the largest value of
32 channels of a token.

q2_1c has the same codes, and a scale and a minimum per channel of 32 tokens
(`shared/channel_groups.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from localkv.quant_formats.shared.bits import (
    Bytes,
    Floats,
    half,
    half_bytes,
    pack_two_bits,
    scaled,
    two_bit_codes,
)
from localkv.quant_formats.shared.channel_groups import affine_groups, scaled_codes
from localkv.quant_formats.shared.cpu.page_order import BY_CHANNEL, SCALES, TWO_BITS
from localkv.quant_formats.shared.rounding import affine_codes, blocks


def decode(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16), qs (8 bytes) -> float32 [..., n_blocks * 32]."""
    d, m, qs = planes
    return scaled(two_bit_codes(qs), half(d), minimum=-half(m))


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, m, qs."""
    d, m, codes = affine_codes(blocks(x, 32), n_bits=2)
    return half_bytes(d), half_bytes(m), pack_two_bits(codes)


def decode_by_channel(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16 of each channel), qs (8 bytes) -> float32 [..., tokens, n_blocks * 32]."""
    d, m, qs = planes
    return scaled_codes(two_bit_codes(qs), d, m)


def encode_by_channel(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, m, qs (see `channel_groups.affine_groups`)."""
    d, m, codes = affine_groups(x, n_bits=2)
    return d, m, pack_two_bits(codes)


# how the CPU lays it out; see `shared/cpu`
BLOCK = 32
SCALED = True
AFFINE = True
PLANES = (SCALES, SCALES, TWO_BITS)
OFFSET = 2


q2_1c = SimpleNamespace(
    BLOCK=BLOCK,
    SCALED=SCALED,
    AFFINE=AFFINE,
    OFFSET=0,
    LAST=3,
    PLANES=(BY_CHANNEL, BY_CHANNEL, *PLANES[2:]),
    decode=decode_by_channel,
    encode=encode_by_channel,
)
