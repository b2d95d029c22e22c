"""The nuq types of caches: codes of a codebook, with an outlier kept aside.

nuq4, nuq3 and nuq2 have codes of 4, 3 and 2 bits, which select from 16, 8 and 4 numbers; nuq3's lie
as in kv3_1.

A block of 32 has a scale, `x = d codebook[q]`. Of every two blocks of a row, 64 values, the one
furthest from 0 is left out of its block's scale: `o` of the first of the two is what is missing to
it as fp16, and `o` of the second is its place among the 64 (KVQuant's dense-and-sparse, with the
outliers of a row in the row). A last block without a second one has no outlier.

The scale has the sign of the block's extreme, so that a codebook, which need not be symmetric, has
one end for it. It is the one of the least squared error of some codes: of those for the scale that
takes the extreme to 127, and for scales somewhat smaller and larger. The sums that it takes are of
integers, so that kernels may add in any order. Beside 16 numbers a scale has six significant bits,
so that 136 times it is an fp16 number, which a GPU takes off all values of a block
(`triton_primitives/ptx.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np

from localkv.quant_formats.shared.bits import (
    Bytes,
    Codes,
    Floats,
    bit_fields,
    half,
    half_bytes,
    ieee,
    pack_bits,
    pack_two_bits,
    scaled,
    two_bit_codes,
)
from localkv.quant_formats.shared.codebooks import LARGEST, NORMAL
from localkv.quant_formats.shared.cpu.page_order import SCALES, TWO_BITS, codes
from localkv.quant_formats.shared.rounding import F16_LIMIT, blocks, scale_and_inverse

PAIR = 64
"""Values of two blocks."""
STRETCHES = (1.0, 1.125, 0.875)
"""How many times as large values become as with their extreme at 127, to choose codes."""
FRACTION = 256
"""Parts of a codebook's unit, in which values are integers where a scale is fitted."""
ROUNDED = 16
"""How many numbers have scales of `SIX_BITS`."""
SIX_BITS = 18
"""Bits of a float32 that are 0 in one with six significant bits."""
SIX_BIT_LIMIT = 64512.0
"""The largest such number that is one of fp16's."""


@ieee
def decode_rows(d: Bytes, o: Bytes, codes: Codes, codebook: Sequence[int]) -> Floats:
    """d, o (2 bytes each), codes (uint8 [..., n_blocks, 32]) -> float32 [..., n_blocks * 32]."""
    values = scaled(np.asarray(codebook, np.int8)[codes], half(d))
    n_pairs = d.shape[-2] // 2
    whole = values[..., : n_pairs * PAIR].reshape(*values.shape[:-1], n_pairs, PAIR)
    missing = half(o[..., 0 : 2 * n_pairs : 2, :])
    place = o[..., 1 : 2 * n_pairs : 2, :1].astype(np.intp) % PAIR
    at_place = np.take_along_axis(whole, place, -1) + missing
    np.put_along_axis(whole, place, at_place, -1)
    values[..., : n_pairs * PAIR] = whole.reshape(*values.shape[:-1], n_pairs * PAIR)
    return values


@ieee
def encode_rows(x: Floats, codebook: Sequence[int]) -> tuple[Bytes, Bytes, Codes]:
    """float32 [..., n] -> d, o, and codes uint8 [..., n_blocks, 32].

    A code selects the number nearest to x / d, halfway the upper. Beyond fp16 values saturate.
    A block with a NaN gets a NaN scale, and is no place for an outlier.
    """
    x = np.clip(x, -F16_LIMIT * LARGEST, F16_LIMIT * LARGEST)
    kept, place, has_outlier = _inliers(x)
    d = half_bytes(_fitted_scale(x, kept, codebook))
    rounded = half(d)
    inverse: Floats = np.float32(1) / rounded
    inverse[~np.isfinite(inverse)] = 0
    values = np.asarray(codebook, np.float32)
    codes = _nearest(blocks(x, 32) * inverse, values)
    o = np.zeros((*d.shape[:-1], 2), np.uint8)
    n_pairs = d.shape[-2] // 2
    if n_pairs:
        whole = x[..., : n_pairs * PAIR].reshape(*x.shape[:-1], n_pairs, PAIR)
        made = values[codes] * rounded
        made = made.reshape(x.shape)[..., : n_pairs * PAIR].reshape(whole.shape)
        missing = np.take_along_axis(whole, place, -1) - np.take_along_axis(made, place, -1)
        missing = np.where(has_outlier, np.clip(missing, -F16_LIMIT, F16_LIMIT), 0)
        o[..., 0 : 2 * n_pairs : 2, :] = half_bytes(missing.astype(np.float32))
        o[..., 1 : 2 * n_pairs : 2, 0] = place[..., 0]
    return d, o, codes


def _nearest(y: Floats, values: Floats) -> Bytes:
    """The codes of the numbers nearest to `y`, halfway the upper; of a NaN the first."""
    codes = np.zeros(y.shape, np.uint8)
    for border in (values[1:] + values[:-1]) / 2:
        codes += y >= border
    return codes


def _inliers(x: Floats) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the outliers of pairs of blocks.

    The first array tells the values that are none of them, bool of x's shape. The second has the
    place of each pair's outlier, int [..., n_pairs, 1]. The third tells whether it is one, since
    blocks with a NaN have none.
    """
    n_pairs = x.shape[-1] // PAIR
    whole = x[..., : n_pairs * PAIR].reshape(*x.shape[:-1], n_pairs, PAIR)
    magnitude = np.abs(whole).reshape(*x.shape[:-1], n_pairs, 2, 32)
    usable = ~np.isnan(magnitude).any(-1, keepdims=True)
    magnitude = np.where(usable, magnitude, -1).reshape(whole.shape)
    place = magnitude.argmax(-1, keepdims=True)
    has_outlier = np.take_along_axis(magnitude, place, -1) >= 0
    of_pairs = np.ones(whole.shape, bool)
    np.put_along_axis(of_pairs, place, ~has_outlier, -1)
    kept = np.ones(x.shape, bool)
    kept[..., : n_pairs * PAIR] = of_pairs.reshape(*x.shape[:-1], n_pairs * PAIR)
    return kept, place, has_outlier


def _in_units(x: Floats, kept: np.ndarray) -> tuple[Floats, Floats]:
    """Blocks with their extreme at 127, 0 for outliers, float32 [..., n_blocks, 32]; and the scale
    that makes them values again."""
    inner = blocks(np.where(kept, x, np.float32(0)), 32)
    high, low = inner.max(-1, keepdims=True), inner.min(-1, keepdims=True)
    extreme = np.where(high >= -low, high, low)
    d, inverse = scale_and_inverse(np.where(extreme == 0, np.float32(0), extreme), LARGEST)
    return inner * inverse, d


@ieee
def _fitted_scale(x: Floats, kept: np.ndarray, codebook: Sequence[int]) -> Floats:
    """The scale of each block, NaN of one with a NaN: float32 [..., n_blocks, 1].

    Args:
        x: float32 [..., n] within what a scale reaches.
        kept: bool [..., n], which of them count.
    """
    y, d = _in_units(x, kept)
    numbers = np.asarray(codebook, np.int32)
    whole = np.where(np.isnan(y), 0, y * FRACTION).astype(np.int32)
    best, factor = np.zeros_like(d), np.ones_like(d)
    for stretch in STRETCHES:
        chosen = numbers[_nearest(y * np.float32(stretch), numbers.astype(np.float32))]
        chosen = np.where(blocks(kept, 32), chosen, 0)
        products = (whole * chosen).sum(-1, keepdims=True).astype(np.float32)
        squares = (chosen * chosen).sum(-1, keepdims=True).astype(np.float32)
        fit = np.where(squares > 0, products / squares, 0)
        gain = products * fit
        factor = np.where(gain > best, fit / FRACTION, factor)
        best = np.maximum(best, gain)
    limit = SIX_BIT_LIMIT if len(codebook) == ROUNDED else F16_LIMIT
    scale: Floats = np.clip(d * factor, -limit, limit)
    return six_bits(scale) if len(codebook) == ROUNDED else scale


def six_bits(x: Floats) -> Floats:
    """The nearest numbers of six significant bits, halfway those further from 0; a NaN is one."""
    bits = (x.view(np.uint32) + np.uint32(1 << (SIX_BITS - 1))) >> SIX_BITS << SIX_BITS
    return np.where(np.isnan(x), x, bits.view(np.float32))


@ieee
def scaled_inliers(x: Floats, codebook: Sequence[int] = ()) -> Floats:
    """What codes are chosen for, in units of the codebook's numbers: float32 [n], all values but
    outliers and values of blocks without a scale. Without a codebook extremes are at 127."""
    x = np.clip(x, -F16_LIMIT * LARGEST, F16_LIMIT * LARGEST)
    kept, _, _ = _inliers(x)
    values, d = _in_units(x, kept)
    if codebook:
        fitted = _fitted_scale(x, kept, codebook)
        values = values * (d / fitted)
        d = fitted
    chosen: Floats = values[blocks(kept, 32) & np.isfinite(d) & (d != 0)]
    return chosen


def decode_nuq4(planes: Sequence[Bytes], codebook: Sequence[int] = NORMAL[16]) -> Floats:
    """d, o (2 bytes each), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, o, qs = planes
    return decode_rows(d, o, bit_fields(qs, n_bits=4, run=16), codebook)


def encode_nuq4(x: Floats, codebook: Sequence[int] = NORMAL[16]) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, o, qs."""
    d, o, codes = encode_rows(x, codebook)
    return d, o, pack_bits(codes, n_bits=4, run=16)


def decode_nuq3(planes: Sequence[Bytes], codebook: Sequence[int] = NORMAL[8]) -> Floats:
    """d, o (2 bytes each), qh (32 bits), qs (8 bytes) -> float32 [..., n_blocks * 32]."""
    d, o, qh, qs = planes
    codes = two_bit_codes(qs) | (bit_fields(qh, n_bits=1, run=1) << 2)
    return decode_rows(d, o, codes, codebook)


def encode_nuq3(x: Floats, codebook: Sequence[int] = NORMAL[8]) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, o, qh, qs."""
    d, o, codes = encode_rows(x, codebook)
    return d, o, pack_bits(codes >> 2, n_bits=1, run=1), pack_two_bits(codes & 3)


def decode_nuq2(planes: Sequence[Bytes], codebook: Sequence[int] = NORMAL[4]) -> Floats:
    """d, o (2 bytes each), qs (8 bytes) -> float32 [..., n_blocks * 32]."""
    d, o, qs = planes
    return decode_rows(d, o, two_bit_codes(qs), codebook)


def encode_nuq2(x: Floats, codebook: Sequence[int] = NORMAL[4]) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, o, qs."""
    d, o, codes = encode_rows(x, codebook)
    return d, o, pack_two_bits(codes)


# how the CPU lays them out; see `shared/cpu`
_type = partial(SimpleNamespace, BLOCK=32, SCALED=True, AFFINE=False, OUTLIERS=1, OFFSET=128)
nuq4 = _type(PLANES=(SCALES, SCALES, codes(8)), decode=decode_nuq4, encode=encode_nuq4)
nuq3 = _type(
    PLANES=(SCALES, SCALES, codes(1, rows=2, unit_items=2), TWO_BITS),
    decode=decode_nuq3,
    encode=encode_nuq3,
)
nuq2 = _type(PLANES=(SCALES, SCALES, TWO_BITS), decode=decode_nuq2, encode=encode_nuq2)
