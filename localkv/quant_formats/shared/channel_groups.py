"""Scales of a channel for a group of tokens, where formats share them: KIVI's codes of K.

Each channel has a scale of its own for 32 consecutive tokens, fp16, and a minimum where the type
has one. A plane of codes is as in the type without the "c" in its name. The planes of scales and
minima have as many bytes as in that type, too. For a group of 32 tokens they are uint8 [32,
n_blocks, 2], which are the fp16 [n_blocks * 32] of all channels, in order.

Types whose names end in 128 have a scale for as many tokens, so a quarter of the bytes for scales.
For a group they are uint8 [128, n_blocks, 1], which are the fp16 [n_blocks * 64] of all channels.
So that a row has whole bytes of them, a block is 64 channels, whose codes are as in two blocks of
32.

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

TOKENS, MANY_TOKENS = 32, 128
LARGEST = 32000.0
BELOW_HALF = 0.5 - 2**-25


def _groups(x: Floats, size: int) -> Floats:
    """A view of [..., tokens, channels] as [..., groups, size, channels]."""
    *lead, tokens, channels = x.shape
    return x.reshape(*lead, tokens // size, size, channels)


def _stored(values: Floats, size: int) -> tuple[Floats, Bytes]:
    """Floats [..., groups, 1, channels] as fp16 has them, and their plane."""
    halves = values.astype(np.float16)
    *lead, groups, _, channels = halves.shape
    block = max(32, size // 2)
    shape = groups * size, channels // block, 2 * block // size
    return halves.astype(np.float32), halves.view(np.uint8).reshape(*lead, *shape)


def group_scales(plane: Bytes, size: int = TOKENS) -> Floats:
    """A plane uint8 [..., tokens, n_blocks, bytes] of groups of `size` tokens -> float32 [...,
    groups, 1, channels]."""
    *lead, tokens, n_blocks, n_bytes = plane.shape
    n_channels = size * n_blocks * n_bytes // 2
    pairs = np.ascontiguousarray(plane).reshape(*lead, tokens // size, n_channels, 2)
    return half(pairs).reshape(*lead, tokens // size, 1, n_channels)


def _in_blocks(codes: Codes) -> Bytes:
    """[..., groups, tokens, channels] -> [..., all tokens, n_blocks, 32], uint8."""
    *lead, groups, size, channels = codes.shape
    blocks: Bytes = codes.view(np.uint8).reshape(*lead, groups * size, channels // 32, 32)
    return blocks


def in_pairs(plane: Bytes) -> Bytes:
    """A field of blocks of 32, [..., n_blocks, bytes], as one of blocks of 64."""
    *lead, n_blocks, n_bytes = plane.shape
    return plane.reshape(*lead, n_blocks // 2, 2 * n_bytes)


def out_of_pairs(plane: Bytes) -> Bytes:
    """The inverse of `in_pairs`."""
    *lead, n_blocks, n_bytes = plane.shape
    return plane.reshape(*lead, 2 * n_blocks, n_bytes // 2)


@ieee
def _inverse(d: Floats) -> Floats:
    inverse: Floats = np.reciprocal(d)
    inverse[~np.isfinite(inverse)] = 0
    return inverse


@ieee
def affine_groups(x: Floats, n_bits: int, size: int = TOKENS) -> tuple[Bytes, Bytes, Bytes]:
    """`x = d code + m` of float32 [..., tokens, channels], whole groups of `size` tokens.

    Returns:
        The planes of d and m, and codes uint8 [..., tokens, n_blocks, 32].
    """
    last = (1 << n_bits) - 1
    x = _groups(np.clip(np.asarray(x, np.float32), -LARGEST, LARGEST), size)
    m, m_plane = _stored(x.min(-2, keepdims=True), size)
    high = np.maximum(x.max(-2, keepdims=True), m)
    d, d_plane = _stored((high - m) / np.float32(last), size)
    codes = truncated((x - m) * _inverse(d) + np.float32(0.5), 0, last)
    return d_plane, m_plane, _in_blocks(codes)


@ieee
def symmetric_groups(x: Floats, last: int) -> tuple[Bytes, Bytes]:
    """`x = d code` of float32 [..., tokens, channels], whole groups, codes from -last to last.

    Returns:
        The plane of d, and codes (of int8) uint8 [..., tokens, n_blocks, 32].
    """
    x = _groups(np.clip(np.asarray(x, np.float32), -LARGEST, LARGEST), TOKENS)
    d, d_plane = _stored(np.abs(x).max(-2, keepdims=True) / np.float32(last), TOKENS)
    y = x * _inverse(d)
    # C's roundf: the added value is less than a half, lest the float below 0.5 be rounded up to 1
    y += np.copysign(np.float32(BELOW_HALF), y)
    return d_plane, _in_blocks(truncated(y, -last, last))


@ieee
def scaled_codes(
    codes: Codes, scales: Bytes, minima: Bytes | None = None, size: int = TOKENS
) -> Floats:
    """Decoded codes [..., tokens, n_blocks, 32], of groups of `size` tokens: float32 [..., tokens,
    channels], the product and the sum rounded once each."""
    *lead, tokens, n_blocks, n = codes.shape
    x = _groups(codes.astype(np.float32, order="C").reshape(*lead, tokens, n_blocks * n), size)
    x *= group_scales(scales, size)
    if minima is not None:
        x += group_scales(minima, size)
    return x.reshape(*lead, tokens, n_blocks * n)
