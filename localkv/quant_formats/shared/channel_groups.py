"""Scales of a channel for a group of tokens, where formats share them: KIVI's codes of K.

Each channel has a scale of its own for 32 consecutive tokens, fp16, and a minimum where the type
has one. A plane of codes is as in the type without the "c" in its name. The planes of scales and
minima have as many bytes as in that type, too: for a group of 32 tokens uint8 [32, n_blocks, 2],
which are the fp16 [n_blocks * 32] of all channels, in order.

Codes are made as in KIVI (Liu et al., 2024; `quantize` in the section on its algorithm):

    d = (largest - least) / (2 ** bits - 1), m = least        code = round((x - m) / d)

m and d are rounded to fp16 first, m before d, and codes are made with what is stored, halves
rounded up. A group whose d is 0 in fp16 has codes of 0. Symmetric codes are q8_0's, made with
the stored d.

Values beyond `LARGEST`, infinities too, are taken for it: then neither a scale times a code nor its
sum with the minimum exceeds fp16, in which GPUs decode. A channel with a NaN has a NaN scale, so
that an error shows.
"""

from __future__ import annotations

import numpy as np

from localkv.quant_formats.shared.bits import Bytes, Codes, Floats, half, ieee
from localkv.quant_formats.shared.rounding import truncated

TOKENS = 32
LARGEST = 32000.0
BELOW_HALF = 0.5 - 2**-25


def _groups(x: Floats) -> Floats:
    """A view of [..., tokens, channels] as [..., groups, TOKENS, channels]."""
    *lead, tokens, channels = x.shape
    return x.reshape(*lead, tokens // TOKENS, TOKENS, channels)


def _stored(values: Floats) -> tuple[Floats, Bytes]:
    """Floats [..., groups, 1, channels] as fp16 has them, and their plane."""
    halves = values.astype(np.float16)
    *lead, groups, _, channels = halves.shape
    plane = halves.view(np.uint8).reshape(*lead, groups * TOKENS, channels // TOKENS, 2)
    return halves.astype(np.float32), plane


def group_scales(plane: Bytes) -> Floats:
    """A plane uint8 [..., tokens, n_blocks, 2] -> float32 [..., groups, 1, channels]."""
    *lead, tokens, n_blocks, _ = plane.shape
    return half(plane).reshape(*lead, tokens // TOKENS, 1, n_blocks * TOKENS)


def _in_blocks(codes: Codes) -> Bytes:
    """[..., groups, TOKENS, channels] -> [..., tokens, n_blocks, 32], uint8."""
    *lead, groups, _, channels = codes.shape
    blocks: Bytes = codes.view(np.uint8).reshape(*lead, groups * TOKENS, channels // TOKENS, TOKENS)
    return blocks


@ieee
def _inverse(d: Floats) -> Floats:
    inverse: Floats = np.reciprocal(d)
    inverse[~np.isfinite(inverse)] = 0
    return inverse


@ieee
def affine_groups(x: Floats, n_bits: int) -> tuple[Bytes, Bytes, Bytes]:
    """`x = d code + m` of float32 [..., tokens, channels], whole groups.

    Returns:
        The planes of d and m, and codes uint8 [..., tokens, n_blocks, 32].
    """
    last = (1 << n_bits) - 1
    x = _groups(np.clip(np.asarray(x, np.float32), -LARGEST, LARGEST))
    m, m_plane = _stored(x.min(-2, keepdims=True))
    high = np.maximum(x.max(-2, keepdims=True), m)
    d, d_plane = _stored((high - m) / np.float32(last))
    codes = truncated((x - m) * _inverse(d) + np.float32(0.5), 0, last)
    return d_plane, m_plane, _in_blocks(codes)


@ieee
def symmetric_groups(x: Floats, last: int) -> tuple[Bytes, Bytes]:
    """`x = d code` of float32 [..., tokens, channels], whole groups, codes from -last to last.

    Returns:
        The plane of d, and codes (of int8) uint8 [..., tokens, n_blocks, 32].
    """
    x = _groups(np.clip(np.asarray(x, np.float32), -LARGEST, LARGEST))
    d, d_plane = _stored(np.abs(x).max(-2, keepdims=True) / np.float32(last))
    y = x * _inverse(d)
    # C's roundf: the added value is less than a half, lest the float below 0.5 be rounded up to 1
    y += np.copysign(np.float32(BELOW_HALF), y)
    return d_plane, _in_blocks(truncated(y, -last, last))


@ieee
def scaled_codes(codes: Codes, scales: Bytes, minima: Bytes | None = None) -> Floats:
    """Decoded codes [..., tokens, n_blocks, 32]: float32 [..., tokens, channels], the product and
    the sum rounded once each."""
    *lead, tokens, n_blocks, size = codes.shape
    x = _groups(codes.astype(np.float32, order="C").reshape(*lead, tokens, n_blocks * size))
    x *= group_scales(scales)
    if minima is not None:
        x += group_scales(minima)
    return x.reshape(*lead, tokens, n_blocks * size)
