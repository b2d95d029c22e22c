"""Five-bit integers, as ggml's: q5_0 is `x = d (q - 16)`, q5_1 `x = d q + m`.

Bits 0 to 3 of the codes are in `qs`, bit 4 of code i is bit i of `qh`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from localkv.quant_formats.shared.bits import (
    Bytes,
    Codes,
    Floats,
    bit_fields,
    half,
    half_bytes,
    less,
    pack_bits,
    scaled,
)
from localkv.quant_formats.shared.cpu.page_order import SCALES, codes
from localkv.quant_formats.shared.cpu.panel_layout import FIFTH_BITS, QS, D, M, planes
from localkv.quant_formats.shared.rounding import affine_codes, blocks, symmetric_codes


def five_bits(qh: Bytes, qs: Bytes) -> Codes:
    """32 bits and 16 bytes of each block -> codes, uint8 [..., n_blocks, 32]."""
    return bit_fields(qs, n_bits=4, run=16) | (bit_fields(qh, n_bits=1, run=1) << 4)


def pack_five_bits(codes: Bytes) -> tuple[Bytes, Bytes]:
    """The inverse of `five_bits`."""
    return pack_bits(codes >> 4, n_bits=1, run=1), pack_bits(codes & 15, n_bits=4, run=16)


def decode_q5_0(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qh (32 bits), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, *codes = planes
    return scaled(less(five_bits(*codes), 16), half(d))


def encode_q5_0(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, qh, qs (ggml's `quantize_row_q5_0_ref`)."""
    d, codes = symmetric_codes(blocks(x, 32), n_bits=5)
    return half_bytes(d), *pack_five_bits(codes)


def decode_q5_1(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16), qh (32 bits), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, m, *codes = planes
    return scaled(five_bits(*codes), half(d), minimum=-half(m))


def encode_q5_1(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, m, qh, qs (ggml's `quantize_row_q5_1_ref`)."""
    d, m, codes = affine_codes(blocks(x, 32), n_bits=5)
    return half_bytes(d), half_bytes(m), *pack_five_bits(codes)


CODES = (codes(1, rows=2, unit_items=2), codes(8))
q5_0 = SimpleNamespace(
    BLOCK=32,
    SCALED=True,
    AFFINE=False,
    OFFSET=16,
    PLANES=(SCALES, *CODES),
    LAYOUT=planes("q5_0", QS, FIFTH_BITS, D),
    decode=decode_q5_0,
    encode=encode_q5_0,
)
q5_1 = SimpleNamespace(
    BLOCK=32,
    SCALED=True,
    AFFINE=True,
    OFFSET=16,
    PLANES=(SCALES, SCALES, *CODES),
    LAYOUT=planes("q5_1", QS, FIFTH_BITS, D, M),
    decode=decode_q5_1,
    encode=encode_q5_1,
)
