"""q4_1: 4-bit codes, a scale and a minimum, `x = d q + m` (ggml's `block_q4_1`)."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.formats.bits import Bytes, Floats, bit_fields, half, half_bytes, pack_bits, scaled
from localkv.formats.rounding import affine_codes, blocks


def decode(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, m, qs = planes
    return scaled(bit_fields(qs, n_bits=4, run=16), half(d), minimum=-half(m))


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, m, qs (ggml's `quantize_row_q4_1_ref`)."""
    d, m, codes = affine_codes(blocks(x, 32), n_bits=4)
    return half_bytes(d), half_bytes(m), pack_bits(codes, n_bits=4, run=16)
