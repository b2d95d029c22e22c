"""iq4_nl: 4-bit codes of a codebook and a scale, `x = d codebook[q]` (ggml's `block_iq4_nl`).

iq4_xs has the same codes in super blocks of 8 groups of 32, `x = d (scale - 32) codebook[q]`
(`block_iq4_xs`). The low 4 bits of the 8 scales are in `scales_l`, the high 2 in `scales_h`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from localkv.quant_formats.shared.bits import (
    Bytes,
    Floats,
    bit_fields,
    half,
    half_bytes,
    half_times,
    ieee,
    less,
    pack_bits,
    scaled,
)
from localkv.quant_formats.shared.cpu.page_order import SCALES, codes
from localkv.quant_formats.shared.cpu.panel_layout import QS, D, PanelPlane, planes
from localkv.quant_formats.shared.rounding import (
    F16_LIMIT,
    blocks,
    largest_magnitude,
    scale_and_inverse,
    sum_in_order,
)

CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The sixteen values of iq4_nl and iq4_xs (ggml's `kvalues_iq4nl`)."""
_VALUES = np.array(CODEBOOK, np.int8)
SMALLEST = 1e-15
"""A block whose values are all below becomes zeros (ggml's `GROUP_MAX_EPS`)."""

HALFWAY = [low + high for low, high in pairwise(CODEBOOK)]
_NEAREST = np.array([bisect_right(HALFWAY, twice) for twice in range(-254, 255)], np.uint8)
"""The code of a value in [-127, 127], by twice the value, rounded down: twice the points halfway
between the codebook's values are whole numbers, so nothing is lost."""


def iq4_values(qs: Bytes) -> NDArray[np.int8]:
    """The values of 4-bit codes in runs of 16: uint8 [..., n_bytes] -> int8 [..., 2 n_bytes]."""
    return _VALUES.take(bit_fields(qs, n_bits=4, run=16))


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
    codes = _nearest_codes(x * scale_and_inverse(extreme, CODEBOOK[0])[1])
    qs = pack_bits(codes, n_bits=4, run=16)
    qs[too_small[..., 0]] = 0
    q = iq4_values(qs).astype(np.float32)
    weighted = x * x * q
    d = sum_in_order(weighted * x) / sum_in_order(weighted * q)
    d = np.where(too_small, np.float32(0), np.clip(d, -F16_LIMIT, F16_LIMIT))
    return half_bytes(d), qs


def decode_iq4_xs(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), scales_h, scales_l (2, 4 bytes), qs (128) -> float32 [..., n_blocks * 256]."""
    d, scales_h, scales_l, qs = planes
    scales = bit_fields(scales_l, n_bits=4, run=1) | (bit_fields(scales_h, n_bits=2, run=1) << 4)
    return scaled(iq4_values(qs), half_times(d, less(scales, 32)))


BLOCK, SCALED, AFFINE, OFFSET = 32, True, False, 128
PLANES = (SCALES, codes(8))
LAYOUT = planes("iq4_nl", QS, D)
XS_LAYOUT = planes("iq4_xs", QS, PanelPlane("scales_l", 1), PanelPlane("scales_h", 1), D)
iq4_xs = SimpleNamespace(LAYOUT=XS_LAYOUT, decode=decode_iq4_xs)
