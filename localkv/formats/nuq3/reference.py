"""nuq3: 3-bit codes of a codebook, a scale, and an outlier of each 64 values (`codebook_rows`).

Codes lie as in q3_1.
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
from localkv.formats.codebook_rows import decode_rows, encode_rows
from localkv.formats.codebooks import NORMAL


def decode(planes: Sequence[Bytes], codebook: Sequence[int] = NORMAL[8]) -> Floats:
    """d, o (2 bytes each), qh (32 bits), qs (8 bytes) -> float32 [..., n_blocks * 32]."""
    d, o, qh, qs = planes
    codes = two_bit_codes(qs) | (bit_fields(qh, n_bits=1, run=1) << 2)
    return decode_rows(d, o, codes, codebook)


def encode(x: Floats, codebook: Sequence[int] = NORMAL[8]) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, o, qh, qs."""
    d, o, codes = encode_rows(x, codebook)
    return d, o, pack_bits(codes >> 2, n_bits=1, run=1), pack_two_bits(codes & 3)
