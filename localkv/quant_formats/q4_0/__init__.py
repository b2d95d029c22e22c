"""q4_0: 4-bit codes and a scale, `x = d (q - 8)` (ggml's `block_q4_0`)."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.quant_formats.shared.bits import (
    Bytes,
    Floats,
    bit_fields,
    half,
    half_bytes,
    less,
    pack_bits,
    scaled,
)
from localkv.quant_formats.shared.cpu.page_order import SCALES, codes
from localkv.quant_formats.shared.cpu.panel_layout import QS, D, planes
from localkv.quant_formats.shared.rounding import blocks, symmetric_codes


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, qs = planes
    return scaled(less(bit_fields(qs, n_bits=4, run=16), 8), half(d))


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, qs (ggml's `quantize_row_q4_0_ref`)."""
    d, codes = symmetric_codes(blocks(x, 32), n_bits=4)
    return half_bytes(d), pack_bits(codes, n_bits=4, run=16)


# how the CPU lays it out; see `shared/cpu`
BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (SCALES, codes(8))
OFFSET = 8
LAYOUT = planes("q4_0", QS, D)
