"""q5_1: 5-bit codes, a scale and a minimum, `x = d q + m` (ggml's `block_q5_1`).

Bits 0 to 3 of the codes are in `qs`, bit 4 of code i is bit i of `qh`.
"""

from __future__ import annotations

from collections.abc import Sequence

from localkv.quant_formats.shared.bits import (
    Bytes,
    Floats,
    bit_fields,
    half,
    half_bytes,
    pack_bits,
    scaled,
)
from localkv.quant_formats.shared.cpu.page_order import SCALES, codes
from localkv.quant_formats.shared.cpu.panel_layout import FIFTH_BITS, QS, D, M, planes
from localkv.quant_formats.shared.rounding import affine_codes, blocks


def decode(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16), qh (32 bits), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, m, qh, qs = planes
    codes = bit_fields(qs, n_bits=4, run=16) | (bit_fields(qh, n_bits=1, run=1) << 4)
    return scaled(codes, half(d), minimum=-half(m))


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, m, qh, qs (ggml's `quantize_row_q5_1_ref`)."""
    d, m, codes = affine_codes(blocks(x, 32), n_bits=5)
    qh = pack_bits(codes >> 4, n_bits=1, run=1)
    return half_bytes(d), half_bytes(m), qh, pack_bits(codes & 15, n_bits=4, run=16)


# how the CPU lays it out; see `shared/cpu`
BLOCK = 32
SCALED = True
AFFINE = True
PLANES = (SCALES, SCALES, codes(1, rows=2, unit_items=2), codes(8))
OFFSET = 16
LAYOUT = planes("q5_1", QS, FIFTH_BITS, D, M)
