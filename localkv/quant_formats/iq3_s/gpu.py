"""iq3_s: runs of 16 codes for 64 values, two words of signs, codes' ninth bits, and two scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.grid_points import (
    bits_of,
    byte_of,
    entry_words,
    grid_table,
    load_beside,
    load_four_words,
    load_two_words,
    sign_words,
    signed_fours,
    units_from,
)
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    halves,
    largest,
    load_half,
    load_items,
    words,
)
from localkv.quant_formats.shared.grids import IQ3_S


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, qs, qh, signs, scales = fields
    bits = bits_of(signs.flatten(1).unflatten(1, (-1, 4)))
    ninth = words(qh.flatten(1), torch.int16)
    codes = entry_words(qs.flatten(1))
    return codes, sign_words(bits), ninth, scales.flatten(1).contiguous(), halves(d)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, signs, qh, scales, d, table = planes
    n, at, ok = units_from(first, n_values, VALUES)
    found = load_four_words(qs, row, n, at, ok, EVEN)
    pair = load_two_words(signs, row, n, at, ok, EVEN)
    above = load_beside(qh, row, n, at, ok, EVEN).to(tl.int32)
    nibbles = load_items(scales, row, n, at, ok, EVEN).to(tl.int32)
    d = load_half(d, row, n_values, at, ok, EVEN, 64)
    parts = ()
    for part in tl.static_range(4):
        q = found[part]
        entries = ()
        for i in tl.static_range(4):
            entries = entries + (byte_of(q, i) | (((above >> (4 * part + i)) & 1) << 8),)
        codes = signed_fours(table, entries, pair[part // 2], 2 * (part % 2), PTX)
        scale = d * (2 * ((nibbles >> (4 * (part // 2))) & 15) + 1).to(tl.float32)
        parts = parts + ((codes, scale),)
    return parts


LAYOUT = WeightLayout(
    64,
    read,
    planes,
    bound=lambda p: 15 * 31 * largest(p[4]),
    table=lambda: grid_table(IQ3_S),
)
