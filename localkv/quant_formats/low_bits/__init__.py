"""Integers of two and of three bits, for caches: kv2_0, kv2_1, kv2_1c, kv3_0, kv3_1, kv3_1c and
kv3_1c128.

Bits 0 and 1 of the codes are in `qs` (`bits.two_bit_codes`), a third bit of code i is bit i of
`qh`.

kv2_1 and kv3_1 have a scale and a minimum, `x = d q + m`. They are rounded as q4_1 is and as KIVI's
values are (arXiv:2402.02750): from the smallest to the largest value of 32 channels of a token.
kv2_1c and kv3_1c have their codes, and a scale and a minimum per channel of 32 tokens; kv3_1c128
has them per channel of 128 (`shared/channel_groups.py`).

kv2_0 is `x = d (2 q - 3)`. Values are -3, -1, 1 and 3 times d, so 0 has no code: one side longer
than the other, as in q4_0, costs more at two bits. Codes are chosen with a scale of the largest
magnitude / 4.5, which is about the scale with the least squared error for Gaussian blocks. Then the
scale becomes the one with the least squared error for the codes. The error (NMSE) is 0.112 of
Gaussian values and 0.078 of values with outliers that have been rotated, where the rule of q4_0
makes 0.131 and 0.110, and the middles of four equal steps (exllamav3) 0.126 and 0.082. Outliers
that aren't rotated are its weakness: 0.50, not 0.10.

kv3_0 is `x = d (q - 4)`. The largest magnitude has code 0, as in q4_0; then the scale becomes the
one of the least squared error. A grid with a step around 0 instead, as kv2_0 has, would be off by a
twentieth more or less, but by 2.6 times as much where there are outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np

from localkv.quant_formats.shared.bits import (
    Bytes,
    Codes,
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
from localkv.quant_formats.shared.channel_groups import (
    MANY_TOKENS,
    affine_groups,
    in_pairs,
    out_of_pairs,
    scaled_codes,
)
from localkv.quant_formats.shared.cpu.page_order import BY_CHANNEL, SCALES, TWO_BITS, codes
from localkv.quant_formats.shared.rounding import (
    F16_LIMIT,
    affine_codes,
    blocks,
    fitted_scale,
    scale_and_inverse,
    symmetric_codes,
    truncated,
)

REACH = 4.5
"""The largest magnitude as a multiple of the scale that kv2_0's codes are chosen with."""


def three_bits(qh: Bytes, qs: Bytes) -> Codes:
    """32 bits and 8 bytes of each block -> codes, uint8 [..., n_blocks, 32]."""
    return two_bit_codes(qs) | (bit_fields(qh, n_bits=1, run=1) << 2)


def pack_three_bits(codes: Bytes) -> tuple[Bytes, Bytes]:
    """The inverse of `three_bits`."""
    return pack_bits(codes >> 2, n_bits=1, run=1), pack_two_bits(codes & 3)


def decode_kv3_1(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16), qh (32 bits), qs (8 bytes) -> float32 [..., n_blocks * 32]."""
    d, m, *codes = planes
    return scaled(three_bits(*codes), half(d), minimum=-half(m))


def encode_kv3_1(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, m, qh, qs."""
    d, m, codes = affine_codes(blocks(x, 32), n_bits=3)
    return half_bytes(d), half_bytes(m), *pack_three_bits(codes)


def decode_kv3_1c(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16 of each channel), qh (32 bits), qs (8 bytes) -> float32 [..., tokens, n]."""
    d, m, *codes = planes
    return scaled_codes(three_bits(*codes), d, m)


def encode_kv3_1c(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, m, qh, qs (see `channel_groups.affine_groups`)."""
    d, m, codes = affine_groups(x, n_bits=3)
    return d, m, *pack_three_bits(codes)


def decode_kv3_1c128(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16 of each channel), qh (64 bits), qs (16 bytes) -> float32 [..., tokens, n]."""
    d, m, *codes = planes
    return scaled_codes(three_bits(*map(out_of_pairs, codes)), d, m, MANY_TOKENS)


def encode_kv3_1c128(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, m, qh, qs (see `channel_groups.affine_groups`)."""
    d, m, codes = affine_groups(x, 3, MANY_TOKENS)
    return d, m, *map(in_pairs, pack_three_bits(codes))


def decode_kv3_0(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qh (32 bits), qs (8 bytes) -> float32 [..., n_blocks * 32]."""
    d, *codes = planes
    return scaled(less(three_bits(*codes), 4), half(d))


@ieee
def encode_kv3_0(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, qh, qs."""
    x = np.clip(blocks(x, 32), -4 * F16_LIMIT, 4 * F16_LIMIT)
    d, codes = symmetric_codes(x, n_bits=3)
    q = codes.astype(np.float32) - 4
    return half_bytes(fitted_scale(x * q, q * q, d)), *pack_three_bits(codes)


def decode_kv2_1(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16), qs (8 bytes) -> float32 [..., n_blocks * 32]."""
    d, m, qs = planes
    return scaled(two_bit_codes(qs), half(d), minimum=-half(m))


def encode_kv2_1(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, m, qs."""
    d, m, codes = affine_codes(blocks(x, 32), n_bits=2)
    return half_bytes(d), half_bytes(m), pack_two_bits(codes)


def decode_kv2_1c(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16 of each channel), qs (8 bytes) -> float32 [..., tokens, n_blocks * 32]."""
    d, m, qs = planes
    return scaled_codes(two_bit_codes(qs), d, m)


def encode_kv2_1c(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, m, qs (see `channel_groups.affine_groups`)."""
    d, m, codes = affine_groups(x, n_bits=2)
    return d, m, pack_two_bits(codes)


def decode_kv2_0(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (8 bytes) -> float32 [..., n_blocks * 32]."""
    d, qs = planes
    return scaled(less(two_bit_codes(qs) << 1, 3), half(d))


@ieee
def encode_kv2_0(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, qs."""
    x = np.clip(blocks(x, 32), -3 * F16_LIMIT, 3 * F16_LIMIT)
    d, inverse = scale_and_inverse(np.abs(x).max(-1, keepdims=True), REACH)
    codes = truncated(x * inverse * np.float32(0.5) + 2, 0, 3).view(np.uint8)
    q = 2 * codes.astype(np.float32) - 3
    return half_bytes(fitted_scale(x * q, q * q, d)), pack_two_bits(codes)


_type = partial(SimpleNamespace, BLOCK=32, SCALED=True)
THREE_BITS = (codes(1, rows=2, unit_items=2), TWO_BITS)
kv3_1 = _type(
    AFFINE=True,
    OFFSET=4,
    PLANES=(SCALES, SCALES, *THREE_BITS),
    decode=decode_kv3_1,
    encode=encode_kv3_1,
)
kv3_1c = _type(
    AFFINE=True,
    OFFSET=0,
    LAST=7,
    PLANES=(BY_CHANNEL, BY_CHANNEL, *THREE_BITS),
    decode=decode_kv3_1c,
    encode=encode_kv3_1c,
)
kv3_1c128 = _type(
    AFFINE=True,
    OFFSET=0,
    LAST=7,
    PLANES=(
        BY_CHANNEL,
        BY_CHANNEL,
        codes(1, rows=2, unit_items=2, blocks=2),
        codes(4, rows=8, blocks=2),
    ),
    decode=decode_kv3_1c128,
    encode=encode_kv3_1c128,
)
kv3_0 = _type(
    AFFINE=False, OFFSET=4, PLANES=(SCALES, *THREE_BITS), decode=decode_kv3_0, encode=encode_kv3_0
)
kv2_1 = _type(
    AFFINE=True,
    OFFSET=2,
    PLANES=(SCALES, SCALES, TWO_BITS),
    decode=decode_kv2_1,
    encode=encode_kv2_1,
)
kv2_1c = _type(
    AFFINE=True,
    OFFSET=0,
    LAST=3,
    PLANES=(BY_CHANNEL, BY_CHANNEL, TWO_BITS),
    decode=decode_kv2_1c,
    encode=encode_kv2_1c,
)
kv2_0 = _type(
    AFFINE=False, OFFSET=3, PLANES=(SCALES, TWO_BITS), decode=decode_kv2_0, encode=encode_kv2_0
)
