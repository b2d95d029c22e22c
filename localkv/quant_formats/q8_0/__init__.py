"""q8_0: 32 signed bytes and a scale, `x = d q` (ggml's `block_q8_0`, `dequantize_row_q8_0`).

Types of caches have the same codes: q8_0c with a scale per channel of 32 tokens
(`shared/channel_groups.py`), q8_t with one for each token and KV head. That is the largest
magnitude / 127, rounded up to fp16 (`shared/rounding.py`), as in vLLM's int8_per_token_head.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from localkv.quant_formats.shared.bits import Bytes, Floats, half, half_bytes, ieee, scaled
from localkv.quant_formats.shared.channel_groups import scaled_codes, symmetric_groups
from localkv.quant_formats.shared.cpu.page_order import BY_CHANNEL, SCALES, codes
from localkv.quant_formats.shared.cpu.panel_layout import FLIP_SIGNS, D, PanelPlane, planes
from localkv.quant_formats.shared.rounding import (
    blocks,
    rounded,
    scale_and_inverse,
    scale_row,
    times_row_scale,
)


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (32 int8) -> float32 [..., n_blocks * 32]."""
    d, qs = planes
    return scaled(qs.view(np.int8), half(d))


@ieee
def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, qs, halves rounded away from zero (ggml's `quantize_row_q8_0_ref`)."""
    x = blocks(x, 32)
    d, inverse = scale_and_inverse(np.abs(x).max(-1, keepdims=True), 127)
    return half_bytes(d), rounded(x * inverse, 127).view(np.uint8)


def decode_by_channel(planes: Sequence[Bytes]) -> Floats:
    """d (fp16 of each channel), qs (32 int8) -> float32 [..., tokens, n_blocks * 32]."""
    d, qs = planes
    return scaled_codes(qs.view(np.int8), d)


def encode_by_channel(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, qs (see `channel_groups.symmetric_groups`)."""
    d, codes = symmetric_groups(x, 127)
    return d, codes.view(np.uint8)


def decode_by_token(planes: Sequence[Bytes]) -> Floats:
    """qs (32 int8), d (fp16, [..., 1, 2]) -> float32 [..., n_blocks * 32]."""
    qs, d = planes
    values = qs.view(np.int8).astype(np.float32)
    return times_row_scale(values.reshape(*qs.shape[:-2], 32 * qs.shape[-2]), d)


@ieee
def encode_by_token(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> qs, d; halves are rounded away from zero."""
    d, scaled = scale_row(x, 127.0)
    return rounded(blocks(scaled, 32), 127).view(np.uint8), d


CODES = codes(8, rows=2, unit_items=2)
BLOCK, SCALED, AFFINE, OFFSET = 32, True, False, 128
PLANES = (SCALES, CODES)
LAYOUT = planes("q8_0", PanelPlane("qs", 4, FLIP_SIGNS), D)
q8_0c = SimpleNamespace(
    BLOCK=32,
    SCALED=True,
    AFFINE=False,
    OFFSET=128,
    LAST=127,
    PLANES=(BY_CHANNEL, CODES),
    decode=decode_by_channel,
    encode=encode_by_channel,
)
q8_t = SimpleNamespace(
    BLOCK=32,
    SCALED=False,
    AFFINE=False,
    OFFSET=128,
    PLANES=(CODES, SCALES),
    decode=decode_by_token,
    encode=encode_by_token,
)
