"""iq2_xs: runs of 16 bytes for 64 values, a word of codes and one of signs and codes' ninth bits,
twice; a word of scales."""

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
    load_four_words,
    sign_words_beside,
    signed_eights,
    units_from,
    with_eighth_signs,
)
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    halves,
    largest,
    load_half,
    load_items,
    words,
)
from localkv.quant_formats.shared.grids import IQ2_XS


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, qs, scales = fields
    pairs = qs.unflatten(-1, (32, 2)).flatten(1, 2)
    codes = entry_words(pairs[..., 0].flatten(1))
    bits = bits_of(pairs[..., 1]).unflatten(1, (-1, 4, 8))
    signs = sign_words_beside(bits[..., 1:], bits[..., 0])
    both = torch.stack([codes, signs], -1).flatten(1)
    return both, words(scales.flatten(1), torch.int16), halves(d)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, scales, d, table = planes
    n, at, ok = units_from(first, n_values, VALUES)
    found = load_four_words(qs, row, n, at, ok, EVEN)
    nibbles = load_items(scales, row, n, at, ok, EVEN).to(tl.int32)
    d = load_half(d, row, n_values, at, ok, EVEN, 64) * 0.125
    parts = ()
    for group in tl.static_range(2):
        q, word = found[2 * group], found[2 * group + 1]
        signs = with_eighth_signs(word)
        for i in tl.static_range(0, 4, 2):
            a = byte_of(q, i) | ((word >> (11 + 4 * i)) & 256)
            b = byte_of(q, i + 1) | ((word >> (15 + 4 * i)) & 256)
            scale = d * (2 * ((nibbles >> (8 * group + 2 * i)) & 15) + 1).to(tl.float32)
            parts = parts + ((signed_eights(table, a, b, signs, i, PTX), scale),)
    return parts


LAYOUT = WeightLayout(
    64,
    read,
    planes,
    bound=lambda p: 43 * 31 / 8 * largest(p[2]),
    table=lambda: grid_table(IQ2_XS),
)
