"""q3_1: 3-bit codes, a scale and a minimum, `x = d q + m`: `q5_1` with fewer bits.

Bits 0 and 1 of the codes are in `qs` (`bits.two_bit_codes`), bit 2 of code i is bit i of `qh`.

q3_1c has the same codes, and a scale and a minimum per channel of 32 tokens
(`shared/channel_groups.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from localkv.quant_formats.shared.bits import (
    Bytes,
    Floats,
    bit_fields,
    half,
    half_bytes,
    pack_bits,
    pack_two_bits,
    scaled,
    two_bit_codes,
)
from localkv.quant_formats.shared.channel_groups import affine_groups, scaled_codes
from localkv.quant_formats.shared.cpu.page_order import BY_CHANNEL, SCALES, TWO_BITS, codes
from localkv.quant_formats.shared.rounding import affine_codes, blocks


def decode(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16), qh (32 bits), qs (8 bytes) -> float32 [..., n_blocks * 32]."""
    d, m, qh, qs = planes
    codes = two_bit_codes(qs) | (bit_fields(qh, n_bits=1, run=1) << 2)
    return scaled(codes, half(d), minimum=-half(m))


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, m, qh, qs."""
    d, m, codes = affine_codes(blocks(x, 32), n_bits=3)
    qh = pack_bits(codes >> 2, n_bits=1, run=1)
    return half_bytes(d), half_bytes(m), qh, pack_two_bits(codes & 3)


def decode_by_channel(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16 of each channel), qh (32 bits), qs (8 bytes) -> float32 [..., tokens, n]."""
    d, m, qh, qs = planes
    codes = two_bit_codes(qs) | (bit_fields(qh, n_bits=1, run=1) << 2)
    return scaled_codes(codes, d, m)


def encode_by_channel(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, m, qh, qs (see `channel_groups.affine_groups`)."""
    d, m, codes = affine_groups(x, n_bits=3)
    qh = pack_bits(codes >> 2, n_bits=1, run=1)
    return d, m, qh, pack_two_bits(codes & 3)


# how the CPU lays it out; see `shared/cpu`
BLOCK = 32
SCALED = True
AFFINE = True
PLANES = (SCALES, SCALES, codes(1, rows=2, unit_items=2), TWO_BITS)
OFFSET = 4


q3_1c = SimpleNamespace(
    BLOCK=BLOCK,
    SCALED=SCALED,
    AFFINE=AFFINE,
    OFFSET=0,
    LAST=7,
    PLANES=(BY_CHANNEL, BY_CHANNEL, *PLANES[2:]),
    decode=decode_by_channel,
    encode=encode_by_channel,
)
