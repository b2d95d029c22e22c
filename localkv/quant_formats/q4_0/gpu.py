"""q4_0: nibbles less 8 and a scale; planes d, qs.

As a weight: `qs` as in the file, 16 bytes a block, and a plane of scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.rows import (
    as_f16,
    in_blocks,
    load_rows,
    load_scales,
    nibble_columns,
    pack_nibbles,
    repeat,
    store_rows,
    symmetric_codes,
)
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    largest,
    load_items,
    load_runs,
    words,
)
from localkv.triton_primitives.unpack import fence, unpack_nibbles

PRODUCT = "fp16"
columns = nibble_columns


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    qs = load_rows(planes[1], first_row, valid.shape[0], 0, WIDTH // 2, HEAD_DIM // 2)
    d = load_scales(planes[0], first_row, valid, HEAD_DIM, WIDTH, 8)
    low, high = unpack_nibbles(qs, 8, PTX)
    d = repeat(d, 16)
    return fence(low * d, PTX), fence(high * d, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    d, codes = symmetric_codes(in_blocks(x), 4)
    store_rows(as_f16(planes[0]), rows, valid, d.to(tl.float16), HEAD_DIM // 32)
    store_rows(planes[1], rows, valid, pack_nibbles(codes), HEAD_DIM // 2)


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, qs = fields
    return qs.flatten(1).contiguous(), words(d.flatten(1), torch.float16)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, d = planes
    n = n_values // 32
    at = first // 32 + tl.arange(0, VALUES // 32)
    ok = at < n
    low, high = unpack_nibbles(load_runs(qs, row, n, at, ok, EVEN), 8, PTX)
    scale = load_items(d, row, n, at, ok, EVEN).to(tl.float32)
    return (low, scale), (high, scale)


LAYOUT = WeightLayout(32, read, planes, bound=lambda p: 8 * largest(p[1]))
