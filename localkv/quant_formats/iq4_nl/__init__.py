"""iq4_nl: 4-bit codes of a codebook and a scale, `x = d codebook[q]` (ggml's `block_iq4_nl`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from localkv.quant_formats.shared.bits import (
    IQ4_CODEBOOK,
    Bytes,
    Floats,
    half,
    half_bytes,
    ieee,
    iq4_values,
    pack_bits,
    scaled,
)
from localkv.quant_formats.shared.cpu.page_order import SCALES, codes
from localkv.quant_formats.shared.cpu.panel_layout import QS, D, planes
from localkv.quant_formats.shared.rounding import (
    F16_LIMIT,
    blocks,
    largest_magnitude,
    scale_and_inverse,
    sum_in_order,
)

SMALLEST = 1e-15
"""A block whose values are all below becomes zeros (ggml's `GROUP_MAX_EPS`)."""

HALFWAY = [low + high for low, high in pairwise(IQ4_CODEBOOK)]
_NEAREST = np.array([bisect_right(HALFWAY, twice) for twice in range(-254, 255)], np.uint8)
"""The code of a value in [-127, 127], by twice the value, rounded down: twice the points halfway
between the codebook's values are whole numbers, so nothing is lost."""


def decode(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (16 bytes) -> float32 [..., n_blocks * 32]."""
    d, qs = planes
    return scaled(iq4_values(qs), half(d))


def _nearest_codes(y: Floats) -> Bytes:
    """Where in the codebook the nearest values are (halfway, the upper): float32 -> uint8."""
    twice = np.clip(np.floor(y + y), -254, 254)
    twice[np.isnan(twice)] = 0
    codes: Bytes = _NEAREST[twice.astype(np.int16) + 254]
    return codes


@ieee
def encode(x: Floats) -> tuple[Bytes, ...]:
    """float32 [..., n] -> d, qs (ggml's `quantize_row_iq4_nl_ref`).

    Codes are chosen with the scale that makes the largest magnitude -127; then the scale becomes
    the one of the least squared error, each weighted with its value's square.
    """
    x = np.clip(blocks(x, 32), -127 * F16_LIMIT, 127 * F16_LIMIT)
    extreme = largest_magnitude(x)
    too_small = np.abs(extreme) < SMALLEST
    codes = _nearest_codes(x * scale_and_inverse(extreme, IQ4_CODEBOOK[0])[1])
    qs = pack_bits(codes, n_bits=4, run=16)
    qs[too_small[..., 0]] = 0
    q = iq4_values(qs).astype(np.float32)
    weighted = x * x * q
    d = sum_in_order(weighted * x) / sum_in_order(weighted * q)
    d = np.where(too_small, np.float32(0), np.clip(d, -F16_LIMIT, F16_LIMIT))
    return half_bytes(d), qs


# how the CPU lays it out; see `shared/cpu`
BLOCK = 32
SCALED = True
AFFINE = False
PLANES = (SCALES, codes(8))
OFFSET = 128
LAYOUT = planes("iq4_nl", QS, D)
