"""nuq4: 4-bit codes of a codebook, a scale, and an outlier of each 64 values (`codebook_rows`)."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.formats.bits import Bytes, Floats, bit_fields, pack_bits
from localkv.formats.codebook_rows import decode_rows, encode_rows
from localkv.formats.codebooks import NORMAL


def decode(planes: Sequence[Bytes], codebook: Sequence[int] = NORMAL[16]) -> Floats:
    """d, o (2 bytes each), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, o, qs = planes
    return decode_rows(d, o, bit_fields(qs, n_bits=4, run=16), codebook)


def encode(x: Floats, codebook: Sequence[int] = NORMAL[16]) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, o, qs."""
    d, o, codes = encode_rows(x, codebook)
    return d, o, pack_bits(codes, n_bits=4, run=16)
