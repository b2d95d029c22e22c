"""iq4_nl: nibbles that stand for sixteen values, and a scale; planes d, qs.

As a weight: as q4_0, but codes are places in a table.
"""

from __future__ import annotations

from itertools import pairwise

import triton
import triton.language as tl

from localkv.quant_formats.iq4_nl import SMALLEST as _SMALLEST
from localkv.quant_formats.q4_0.gpu import planes
from localkv.quant_formats.shared.bits import IQ4_CODEBOOK
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
    largest,
    load_items,
    load_runs,
)
from localkv.triton_primitives.unpack import fence, unpack_codebook

PRODUCT = "fp16"
columns = nibble_columns

CODEBOOK = tl.constexpr(IQ4_CODEBOOK)
HALFWAY = tl.constexpr(tuple((low + high) / 2 for low, high in pairwise(IQ4_CODEBOOK)))
STEPS = tl.constexpr(tuple(high - low for low, high in pairwise(IQ4_CODEBOOK)))
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


CODEBOOK = tl.constexpr(IQ4_CODEBOOK)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, d = planes
    n = n_values // 32
    at = first // 32 + tl.arange(0, VALUES // 32)
    ok = at < n
    low, high = unpack_codebook(load_runs(qs, row, n, at, ok, EVEN), CODEBOOK, PTX)
    scale = load_items(d, row, n, at, ok, EVEN).to(tl.float32)
    return (low, scale), (high, scale)


LAYOUT = WeightLayout(32, read, planes, bound=lambda p: 127 * largest(p[1]))
