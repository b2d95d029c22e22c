"""q5_1: 5-bit codes, a scale and a minimum; planes d, m, qh, qs.

As a weight: as q5_0, and a plane of minima; rows in units of 128.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.rows import (
    affine_codes,
    as_f16,
    as_i32,
    in_blocks,
    load_five_bits,
    load_scales,
    nibble_columns,
    pack_fifth_bits,
    pack_nibbles,
    repeat,
    store_rows,
)
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    fifth_bits,
    largest,
    load_items,
    load_runs,
    padded_blocks,
    two_parts,
    words,
)
from localkv.triton_primitives.unpack import fence

PRODUCT = "fp16"
columns = nibble_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    low, high = load_five_bits(
        planes[3], planes[2], first_row, valid.shape[0], HEAD_DIM, WIDTH, 0, PTX
    )
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 2 * 31)
    m = load_scales(planes[1], first_row, valid, HEAD_DIM, WIDTH, 2)
    d, m = repeat(d, 16), repeat(m, 16)
    return fence(low * d + m, PTX), fence(high * d + m, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, m, codes = affine_codes(in_blocks(x), 5)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_f16(planes[1]), rows, valid, m.to(tl.float16), HEAD_DIM // 32)
    store_rows(as_i32(planes[2]), rows, valid, pack_fifth_bits(codes), HEAD_DIM // 32)
    store_rows(planes[3], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, m, qh, qs = (padded_blocks(field, 4) for field in fields)
    scales, minima = (words(field.flatten(1), torch.float16) for field in (d, m))
    return qs.flatten(1), fifth_bits(qh, run=1), scales, minima


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, qh, d, m = planes
    n = tl.cdiv(n_values, 128)
    at = first // 128 + tl.arange(0, VALUES // 128)
    ok = at < n
    above = load_runs(qh, row, n, at, ok, EVEN)
    parts = ()
    for part in tl.static_range(0, 8, 2):
        low, high = two_parts(qs, above, row, n, at, ok, part, 0, EVEN, PTX)
        scale = load_items(d, row, 4 * n, 4 * at + part // 2, ok, EVEN).to(tl.float32)
        minimum = load_items(m, row, 4 * n, 4 * at + part // 2, ok, EVEN).to(tl.float32)
        parts = parts + ((low, scale, minimum), (high, scale, minimum))
    return parts


LAYOUT = WeightLayout(128, read, planes, bound=lambda p: 31 * largest(p[2]) + largest(p[3]))
