"""iq4_nl and iq4_xs on a CPU: nibbles that select from a codebook; planes d, qs."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from localkv.quant_formats.iq4_nl import CODEBOOK, LAYOUT, OFFSET, XS_LAYOUT
from localkv.quant_formats.shared.cpu.panel_codes import (
    PanelFormat,
    Record,
    bit_field,
    nibble_codes,
    whole_number,
)
from localkv.quant_formats.shared.cpu.rounding import (
    LIMIT,
    ZERO,
    inverse,
    largest_magnitude,
    put_half,
    scale,
    within,
)
from localkv.simd.integer import high_nibbles, load_nibbles_from_table, look_up, low_nibbles
from localkv.simd.memory import get_f32, put_u8
from localkv.simd.quads import load_quads, quad_from_table
from localkv.simd.vector import constant, i8

UNSIGNED = tuple(value + OFFSET for value in CODEBOOK)
HALFWAY = tuple(np.float32(low + high) for low, high in pairwise(CODEBOOK))
"""Twice the points halfway between the codebook's values."""

SMALLEST = np.float32(1e-15)
"""A block whose values are all below becomes zeros (ggml's `GROUP_MAX_EPS`)."""

LARGEST = np.float32(127) * LIMIT


@njit
def decode(planes: Any, u: int) -> Any:
    return load_nibbles_from_table(planes[1], u * 16, CODEBOOK)


@njit
def quads(planes: Any, u: int) -> Any:
    packed = load_quads(planes[1], u * 16)
    low, high = low_nibbles(packed), high_nibbles(packed)
    return quad_from_table(low, UNSIGNED), quad_from_table(high, UNSIGNED)


@njit
def nearest(y: Any) -> int:
    """Where in the codebook the nearest value is; halfway, the upper."""
    if y != y:
        y = ZERO
    code = 0
    for i in range(15):
        code += y + y >= HALFWAY[i]
    return code


@njit(error_model="numpy")
def encode(x: Any, planes: Any, u: int) -> None:
    extreme = largest_magnitude(x, 32 * u, LARGEST)
    factor = inverse(scale(extreme, np.float32(-127)))
    products, squares = ZERO, ZERO
    for i in range(32):
        value = within(get_f32(x, 32 * u + i), LARGEST)
        q = np.float32(CODEBOOK[nearest(value * factor)])
        weighted = value * value * q
        products += weighted * value
        squares += weighted * q
    d = within(products / squares, LIMIT)
    too_small = abs(extreme) < SMALLEST
    put_half(planes[0], u, ZERO if too_small else d)
    for i in range(16):
        low = nearest(within(get_f32(x, 32 * u + i), LARGEST) * factor)
        high = nearest(within(get_f32(x, 32 * u + 16 + i), LARGEST) * factor)
        put_u8(planes[1], 16 * u + i, 0 if too_small else low | high << 4)


def codebook_codes(record: Record, block: int) -> list[Any]:
    b = record.builder
    return [look_up(b, UNSIGNED, x) for x in nibble_codes(record, block)]


def scale_of_group(record: Record, block: int, half: int) -> Any:
    """iq4_xs's scales of 32 values each, six bits less 32, times d."""
    b = record.builder
    low = bit_field(b, record.small("scales_l", block // 2), block % 2 * 4, 0x0F)
    high = bit_field(b, record.small("scales_h", block // 4), block % 4 * 2 - 4, 0x30)
    bits = b.sub(b.or_(low, high), constant(i8, 32))
    return b.fmul(record.halves("d"), whole_number(b, bits, signed=True))


PANELS = PanelFormat(LAYOUT, codebook_codes, zero=128)
iq4_xs = SimpleNamespace(PANELS=PanelFormat(XS_LAYOUT, codebook_codes, scale_of_group, zero=128))
