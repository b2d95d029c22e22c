"""Four-bit integers: ggml's q4_0, `x = d (q - 8)`, and q4_1, `x = d q + m`, and types of caches.

q4_1c has q4_1's codes, and a scale and a minimum per channel of 32 tokens, q4_1c128 of 128
(`shared/channel_groups.py`). q4_t has them with a scale and a minimum for each token and KV head:
rounding is q4_1's with a row for a block. LMDeploy's int4 cache and vLLM's int4_per_token_head do
so, but their zero point m / d is rounded to a code.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from localkv.quant_formats.shared.bits import (
    Bytes,
    Floats,
    bit_fields,
    half,
    half_bytes,
    ieee,
    less,
    pack_bits,
    scaled,
)
from localkv.quant_formats.shared.channel_groups import (
    MANY_TOKENS,
    affine_groups,
    in_pairs,
    out_of_pairs,
    scaled_codes,
)
from localkv.quant_formats.shared.cpu.page_order import BY_CHANNEL, SCALES, codes
from localkv.quant_formats.shared.cpu.panel_layout import QS, D, M, planes
from localkv.quant_formats.shared.rounding import affine_codes, blocks, symmetric_codes


def nibbles(qs: Bytes) -> Bytes:
    """16 bytes of each block -> codes, uint8 [..., n_blocks, 32]."""
    return bit_fields(qs, n_bits=4, run=16)


def pack_nibbles(codes: Bytes) -> Bytes:
    """The inverse of `nibbles`."""
    return pack_bits(codes, n_bits=4, run=16)


def decode_q4_0(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, qs = planes
    return scaled(less(nibbles(qs), 8), half(d))


def encode_q4_0(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, qs (ggml's `quantize_row_q4_0_ref`)."""
    d, codes = symmetric_codes(blocks(x, 32), n_bits=4)
    return half_bytes(d), pack_nibbles(codes)


def decode_q4_1(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, m, qs = planes
    return scaled(nibbles(qs), half(d), minimum=-half(m))


def encode_q4_1(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, m, qs (ggml's `quantize_row_q4_1_ref`)."""
    d, m, codes = affine_codes(blocks(x, 32), n_bits=4)
    return half_bytes(d), half_bytes(m), pack_nibbles(codes)


def decode_q4_1c(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16 of each channel), qs (16 bytes) -> float32 [..., tokens, n_blocks * 32]."""
    d, m, qs = planes
    return scaled_codes(nibbles(qs), d, m)


def encode_q4_1c(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, m, qs (see `channel_groups.affine_groups`)."""
    d, m, codes = affine_groups(x, n_bits=4)
    return d, m, pack_nibbles(codes)


def decode_q4_1c128(planes: Sequence[Bytes]) -> Floats:
    """d, m (fp16 of each channel), qs (32 bytes) -> float32 [..., tokens, n_blocks * 64]."""
    d, m, qs = planes
    return scaled_codes(nibbles(out_of_pairs(qs)), d, m, MANY_TOKENS)


def encode_q4_1c128(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., tokens, n] -> d, m, qs (see `channel_groups.affine_groups`)."""
    d, m, codes = affine_groups(x, 4, MANY_TOKENS)
    return d, m, in_pairs(pack_nibbles(codes))


@ieee
def decode_q4_t(planes: Sequence[Bytes]) -> Floats:
    """qs (16 bytes), d, m (fp16, [..., 1, 2]) -> float32 [..., n_blocks * 32]."""
    qs, d, m = planes
    codes = nibbles(qs).reshape(*qs.shape[:-2], 32 * qs.shape[-2])
    return codes.astype(np.float32) * half(d)[..., 0] + half(m)[..., 0]


def encode_q4_t(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> qs, d, m."""
    d, m, codes = affine_codes(x[..., None, :], n_bits=4)
    in_blocks = codes.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    return pack_nibbles(in_blocks), half_bytes(d), half_bytes(m)


q4_0 = SimpleNamespace(
    BLOCK=32,
    SCALED=True,
    AFFINE=False,
    OFFSET=8,
    PLANES=(SCALES, codes(8)),
    LAYOUT=planes("q4_0", QS, D),
    decode=decode_q4_0,
    encode=encode_q4_0,
)
q4_1 = SimpleNamespace(
    BLOCK=32,
    SCALED=True,
    AFFINE=True,
    OFFSET=8,
    PLANES=(SCALES, SCALES, codes(8)),
    LAYOUT=planes("q4_1", QS, D, M),
    decode=decode_q4_1,
    encode=encode_q4_1,
)
q4_1c = SimpleNamespace(
    BLOCK=32,
    SCALED=True,
    AFFINE=True,
    OFFSET=0,
    LAST=15,
    PLANES=(BY_CHANNEL, BY_CHANNEL, codes(8)),
    decode=decode_q4_1c,
    encode=encode_q4_1c,
)
q4_1c128 = SimpleNamespace(
    BLOCK=32,
    SCALED=True,
    AFFINE=True,
    OFFSET=0,
    LAST=15,
    PLANES=(BY_CHANNEL, BY_CHANNEL, codes(8, blocks=2)),
    decode=decode_q4_1c128,
    encode=encode_q4_1c128,
)
q4_t = SimpleNamespace(
    BLOCK=32,
    SCALED=False,
    AFFINE=True,
    OFFSET=8,
    PLANES=(codes(8), SCALES, SCALES),
    decode=decode_q4_t,
    encode=encode_q4_t,
)
