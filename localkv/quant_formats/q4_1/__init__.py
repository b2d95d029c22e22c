"""q4_1: 4-bit codes, a scale and a minimum, `x = d q + m` (ggml's `block_q4_1`).

q4_1c has the same codes, and a scale and a minimum per channel of 32 tokens
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
    scaled,
)
from localkv.quant_formats.shared.channel_groups import affine_groups, scaled_codes
from localkv.quant_formats.shared.cpu.page_order import BY_CHANNEL, SCALES, codes
from localkv.quant_formats.shared.cpu.panel_layout import QS, D, M, planes
from localkv.quant_formats.shared.rounding import affine_codes, blocks


def decode(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, m, qs = planes
    return scaled(bit_fields(qs, n_bits=4, run=16), half(d), minimum=-half(m))


def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, m, qs (ggml's `quantize_row_q4_1_ref`)."""
    d, m, codes = affine_codes(blocks(x, 32), n_bits=4)
    return half_bytes(d), half_bytes(m), pack_bits(codes, n_bits=4, run=16)


def decode_by_channel(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16 of each channel), qs (16 bytes) -> float32 [..., tokens, n_blocks * 32]."""
    d, m, qs = planes
    return scaled_codes(bit_fields(qs, n_bits=4, run=16), d, m)


def encode_by_channel(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, m, qs (see `channel_groups.affine_groups`)."""
    d, m, codes = affine_groups(x, n_bits=4)
    return d, m, pack_bits(codes, n_bits=4, run=16)


# how the CPU lays it out; see `shared/cpu`
BLOCK = 32
SCALED = True
AFFINE = True
PLANES = (SCALES, SCALES, codes(8))
OFFSET = 8
LAYOUT = planes("q4_1", QS, D, M)


q4_1c = SimpleNamespace(
    BLOCK=BLOCK,
    SCALED=SCALED,
    AFFINE=AFFINE,
    OFFSET=0,
    LAST=15,
    PLANES=(BY_CHANNEL, BY_CHANNEL, *PLANES[2:]),
    decode=decode_by_channel,
    encode=encode_by_channel,
)
