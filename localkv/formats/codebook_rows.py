"""Rows of codes of a codebook, with an outlier kept apart: what the `nuq` types share.

A block of 32 has a scale, `x = d codebook[q]`. Of every two blocks of a row, 64 values, the one
furthest from 0 is left out of its block's scale: `o` of the first of the two is what is missing to
it as fp16, and `o` of the second is its place among the 64 (KVQuant's dense-and-sparse, with the
outliers of a row in the row). A last block without a second one has no outlier.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localkv.formats.bits import Bytes, Codes, Floats, half, half_bytes, ieee, scaled
from localkv.formats.codebooks import LARGEST
from localkv.formats.rounding import F16_LIMIT, blocks, scale_and_inverse

PAIR = 64
"""Values of two blocks."""


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

    A code is that of the number nearest to x / d, halfway the upper; d is the largest magnitude /
    127 in fp16. Beyond fp16 values saturate. A block with a NaN gets a NaN scale, and is no place
    for an outlier.
    """
    x = np.clip(x, -F16_LIMIT * LARGEST, F16_LIMIT * LARGEST)
    inner, place, has_outlier = _without_outliers(x)
    inner = blocks(inner, 32)
    largest = np.abs(inner).max(-1, keepdims=True)
    d = half_bytes(scale_and_inverse(largest, LARGEST)[0])
    rounded = half(d)
    inverse = 1 / rounded
    inverse[~np.isfinite(inverse)] = 0
    values = np.asarray(codebook, np.float32)
    halfway = (values[1:] + values[:-1]) / 2
    scaled_x = blocks(x, 32) * inverse
    codes = np.zeros(scaled_x.shape, np.uint8)
    for border in halfway:
        codes += scaled_x >= border
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


def _without_outliers(x: Floats) -> tuple[Floats, np.ndarray, np.ndarray]:
    """The values with a 0 for the outlier of each pair of blocks; its place, int [..., n_pairs, 1];
    and whether it is one, since blocks with a NaN have none."""
    n_pairs = x.shape[-1] // PAIR
    x = x.copy()
    whole = x[..., : n_pairs * PAIR].reshape(*x.shape[:-1], n_pairs, PAIR)
    magnitude = np.abs(whole).reshape(*x.shape[:-1], n_pairs, 2, 32)
    usable = ~np.isnan(magnitude).any(-1, keepdims=True)
    magnitude = np.where(usable, magnitude, -1).reshape(whole.shape)
    place = magnitude.argmax(-1, keepdims=True)
    has_outlier = np.take_along_axis(magnitude, place, -1) >= 0
    kept = np.take_along_axis(whole, place, -1)
    np.put_along_axis(whole, place, np.where(has_outlier, np.float32(0), kept), -1)
    x[..., : n_pairs * PAIR] = whole.reshape(*x.shape[:-1], n_pairs * PAIR)
    return x, place, has_outlier


@ieee
def scaled_inliers(x: Floats) -> Floats:
    """What codes are chosen for, in units of the codebook's numbers: float32 [n], all values but
    outliers and those of blocks without a scale."""
    x = np.clip(x, -F16_LIMIT * LARGEST, F16_LIMIT * LARGEST)
    inner, place, has_outlier = _without_outliers(x)
    keep = np.ones(inner.shape, bool)
    n = place.shape[-2] * PAIR
    whole = keep[..., :n].reshape(*x.shape[:-1], n // PAIR, PAIR)
    np.put_along_axis(whole, place, ~has_outlier, -1)
    keep[..., :n] = whole.reshape(*x.shape[:-1], n)
    inner = blocks(inner, 32)
    largest = np.abs(inner).max(-1, keepdims=True)
    values = inner * scale_and_inverse(largest, LARGEST)[1]
    chosen: Floats = values[blocks(keep, 32) & (largest > 0)]
    return chosen
