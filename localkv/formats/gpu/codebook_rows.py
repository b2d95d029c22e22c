"""Common parts of types with codebooks: numbers looked up, outliers apart
(`formats/codebook_rows.py`). The last plane is the codebook, fp32 [16]."""

from __future__ import annotations

import triton
import triton.language as tl

from localkv.formats.codebook_rows import PAIR as VALUES
from localkv.formats.codebooks import LARGEST as LARGEST_NUMBER
from localkv.formats.gpu.low_bit_rows import one_after_the_other
from localkv.formats.gpu.planes import as_f16, load_rows, load_scales, repeat, store_rows
from localkv.formats.gpu.rounding import F16_LIMIT, NAN, in_blocks, limited
from localkv.triton_primitives.saturate import F16_MAX, saturate

PAIR = tl.constexpr(VALUES)
LARGEST = tl.constexpr(LARGEST_NUMBER)


@triton.jit
def look_up(codebook, codes):
    """The numbers of codes, fp16."""
    return tl.load(codebook + codes.to(tl.int32)).to(tl.float16)


@triton.jit
def as_i16(plane):
    """A plane of 16-bit words."""
    return plane.to(tl.pointer_type(tl.int16))


@triton.jit
def spread(x, TIMES: tl.constexpr, QUARTERS: tl.constexpr):
    """An item for each of equal parts of a row, once for each column of a half of a tile.

    Args:
        TIMES: columns of a part.
        QUARTERS: columns are in the order of `quarter_columns`, not of `nibble_columns`.
    """
    if QUARTERS:
        quarter = repeat(x, TIMES // 2)
        return one_after_the_other(quarter, quarter)
    else:
        return repeat(x, TIMES)


@triton.jit
def scaled_with_outliers(
    low,
    high,
    columns,
    planes,
    first_row,
    valid,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUARTERS: tl.constexpr,
):
    """Values of the halves of a tile from numbers of the codebook: fp16 [rows, WIDTH / 2] twice.

    Args:
        columns: channels of both halves.
    """
    rows: tl.constexpr = valid.shape[0]
    blocks: tl.constexpr = WIDTH // 32
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, LARGEST)
    d = spread(d, 16, QUARTERS)
    low, high = low * d, high * d
    if HEAD_DIM < PAIR:
        return low, high
    else:
        items = load_rows(as_i16(planes[1]), first_row, rows, 0, blocks, HEAD_DIM // 32)
        items = tl.where(valid[:, None], items, 0)
        missing, place = tl.split(tl.reshape(items, (rows, blocks // 2, 2)))
        missing = spread(missing.to(tl.float16, bitcast=True), PAIR // 2, QUARTERS)
        place = spread(place, PAIR // 2, QUARTERS) & (PAIR - 1)
        low += tl.where(place == (columns[0] % PAIR)[None, :], missing, 0.0)
        high += tl.where(place == (columns[1] % PAIR)[None, :], missing, 0.0)
        return saturate(low, F16_MAX), saturate(high, F16_MAX)


@triton.jit
def write_codes(
    planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr
):
    """Write scales and outliers of rows; their codes, int32 [rows, WIDTH / 32, 32]."""
    n: tl.constexpr = x.shape[0]
    blocks: tl.constexpr = WIDTH // 32
    limit: tl.constexpr = LARGEST * F16_LIMIT
    codebook = planes[len(planes) - 1]
    x = in_blocks(tl.where(x == x, limited(x, limit), x))
    has_nan = tl.max((x != x).to(tl.int32), 2) > 0
    size = tl.where(has_nan[:, :, None], -1.0, tl.abs(x))
    if HEAD_DIM >= PAIR:
        pairs: tl.constexpr = blocks // 2
        of_pair = tl.reshape(size, (n, pairs, PAIR))
        i = tl.arange(0, PAIR)[None, None, :]
        largest = tl.max(of_pair, 2)
        place = tl.min(tl.where(of_pair == largest[:, :, None], i, PAIR), 2)
        whole = tl.arange(0, pairs) < HEAD_DIM // PAIR
        is_one = (largest >= 0) & whole[None, :]
        chosen = (i == place[:, :, None]) & is_one[:, :, None]
        size = tl.where(tl.reshape(chosen, (n, blocks, 32)), 0.0, size)
    d = limited(tl.div_rn(tl.max(size, 2), LARGEST * 1.0), F16_LIMIT)
    halves = tl.where(has_nan, NAN, d).to(tl.float16)
    rounded = halves.to(tl.float32)
    inverse = tl.where(rounded > 0, tl.div_rn(1.0, rounded), 0.0)
    y = x * inverse[:, :, None]
    codes = tl.zeros(x.shape, tl.int32)
    for j in tl.static_range(CODES - 1):
        border = (tl.load(codebook + j) + tl.load(codebook + j + 1)) * 0.5
        codes += (y >= border).to(tl.int32)
    store_rows(as_f16(planes[0]), rows, valid, halves, HEAD_DIM // 32)
    if HEAD_DIM >= PAIR:
        left = x - tl.load(codebook + codes) * rounded[:, :, None]
        left = limited(tl.reshape(left, (n, pairs, PAIR)), F16_LIMIT)
        missing = tl.sum(tl.where(chosen, left, 0.0), 2).to(tl.float16)
        place = tl.where(is_one | (largest < 0), place, 0) * whole[None, :].to(tl.int32)
        items = tl.join(missing.to(tl.int16, bitcast=True), place.to(tl.int16))
        items = tl.reshape(items, (n, blocks))
    else:
        items = tl.zeros((n, blocks), tl.int16)
    store_rows(as_i16(planes[1]), rows, valid, items, HEAD_DIM // 32)
    return codes
