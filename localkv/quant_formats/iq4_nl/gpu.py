"""iq4_nl and iq4_xs on a GPU: nibbles that stand for sixteen values, and a scale; planes d, qs.

As a weight: as q4_0, but codes are places in a table. iq4_xs's scales are split as q3_K's, a word
each for a unit of 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.iq4_nl import CODEBOOK as VALUES
from localkv.quant_formats.iq4_nl import SMALLEST as _SMALLEST
from localkv.quant_formats.shared.gpu.rows import (
    F16_LIMIT,
    NAN,
    as_f16,
    in_blocks,
    largest_magnitude,
    limited,
    load_rows,
    load_scales,
    nibble_columns,
    pack_nibbles,
    repeat,
    scale_and_inverse,
    store_rows,
    sum_in_order,
)
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    bit_fields,
    codes_and_scales,
    halves,
    largest,
    load_half,
    load_items,
    load_runs,
    six_bit_planes,
    six_bits,
    units_from,
    words,
)
from localkv.triton_primitives.unpack import fence, unpack_codebook

PRODUCT = "fp16"
columns = nibble_columns
CODEBOOK = tl.constexpr(VALUES)
HALFWAY = tl.constexpr(tuple((low + high) / 2 for low, high in pairwise(VALUES)))
STEPS = tl.constexpr(tuple(high - low for low, high in pairwise(VALUES)))
SMALLEST = tl.constexpr(_SMALLEST)


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[1], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 127)
    low, high = unpack_codebook(qs, CODEBOOK, PTX)
    d = repeat(d, 16)
    return fence(low * d, PTX), fence(high * d, PTX)


@triton.jit
def _nearest(y):
    """Codes of the nearest values (halfway, the upper), and those values; 0 for a NaN."""
    y = tl.where(y == y, y, 0.0)
    code = tl.zeros(y.shape, tl.int32)
    value = tl.zeros(y.shape, tl.float32) + CODEBOOK[0]
    for i in tl.static_range(15):
        above = y >= HALFWAY[i]
        code += above.to(tl.int32)
        value += tl.where(above, STEPS[i] * 1.0, 0.0)
    return code, value


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    x = in_blocks(x)
    limit: tl.constexpr = 127 * F16_LIMIT
    x = tl.where(x == x, limited(x, limit), x)
    extreme, has_nan = largest_magnitude(x)
    too_small = (tl.abs(extreme) < SMALLEST) & (has_nan == 0)
    _, inverse = scale_and_inverse(extreme, has_nan, CODEBOOK[0] * 1.0)
    codes, q = _nearest(x * inverse[:, :, None])
    weighted = x * x * q
    d = tl.div_rn(sum_in_order(weighted * x), sum_in_order(weighted * q))
    d = tl.where(has_nan, NAN, limited(d, F16_LIMIT))
    d = tl.where(too_small, 0.0, d)
    codes = tl.where(too_small[:, :, None], 0, codes)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(planes[1], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, d = planes
    n, at, ok = units_from(first, n_values, 32, VALUES)
    low, high = unpack_codebook(load_runs(qs, row, n, at, ok, EVEN), CODEBOOK, PTX)
    scale = load_items(d, row, n, at, ok, EVEN).to(tl.float32)
    return (low, scale), (high, scale)


LAYOUT = WeightLayout(32, read, codes_and_scales, bound=lambda p: 127 * largest(p[1]))


def planes_iq4_xs(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, scales_h, scales_l, qs = fields
    scales = bit_fields(scales_l, n_bits=4, run=1) | (bit_fields(scales_h, n_bits=2, run=1) << 4)
    low, high = six_bit_planes(scales.flatten(1))
    return qs.flatten(1), words(low, torch.int16), high, halves(d)


@triton.jit
def read_iq4_xs(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, lows, highs, d = planes
    n, at, ok = units_from(first, n_values, 128, VALUES)
    low = load_items(lows, row, n, at, ok, EVEN).to(tl.int32)
    high = load_items(highs, row, n, at, ok, EVEN).to(tl.int32)
    d = load_half(d, row, n_values, at, ok, EVEN, 128)
    parts = ()
    for group in tl.static_range(4):
        q = load_runs(qs, row, 4 * n, 4 * at + group, ok, EVEN)
        a, b = unpack_codebook(q, CODEBOOK, PTX)
        scale = d * (six_bits(low, high, group) - 32).to(tl.float32)
        parts = parts + ((a, scale), (b, scale))
    return parts


iq4_xs = SimpleNamespace(
    LAYOUT=WeightLayout(128, read_iq4_xs, planes_iq4_xs, bound=lambda p: 32 * 127 * largest(p[3]))
)
