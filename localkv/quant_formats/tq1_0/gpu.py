"""tq1_0: in units of 256, three runs of five digits a byte, and a word of the last 16 values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    halves,
    largest,
    load_items,
    load_runs,
    words,
)
from localkv.triton_primitives.unpack import plus_1024, unpack_five_digits


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    qs, qh, d = fields
    last, rest = torch.zeros_like(qh), qh
    for digit in range(4):
        product = rest.to(torch.int16) * 3
        last = last | ((product >> 8) << (2 * digit)).to(torch.uint8)
        rest = product.to(torch.uint8)
    last = words(last.flatten(1), torch.int32)
    return qs.flatten(1).contiguous(), last, halves(d)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, last, d = planes
    n = n_values // 256
    at = first // 256 + tl.arange(0, VALUES // 256)
    ok = at < n
    scale = load_items(d, row, n, at, ok, EVEN).to(tl.float32)
    word = load_items(last, row, n, at, ok, EVEN)
    first_run = unpack_five_digits(load_runs(qs, row, 3 * n, 3 * at, ok, EVEN), PTX)
    second_run = unpack_five_digits(load_runs(qs, row, 3 * n, 3 * at + 1, ok, EVEN), PTX)
    parts = ()
    for digit in tl.static_range(5):
        parts = parts + ((first_run[digit], scale), (second_run[digit], scale))
    third_run = unpack_five_digits(load_runs(qs, row, 3 * n, 3 * at + 2, ok, EVEN), PTX)
    for digit in tl.static_range(5):
        parts = parts + ((third_run[digit], scale),)
    j = tl.arange(0, 16)[None, None, :]
    codes = (word[:, :, None] >> (8 * (j % 4) + 2 * (j // 4))) & 3
    return parts + ((plus_1024(codes.to(tl.uint8)) - 1025.0, scale),)


LAYOUT = WeightLayout(256, read, planes, bound=lambda p: largest(p[2]))
