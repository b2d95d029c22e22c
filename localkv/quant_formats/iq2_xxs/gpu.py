"""iq2_xxs: runs of 16 bytes for 64 values, a word of codes and one of signs and a scale, twice."""

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
    other_bits,
    sign_words_beside,
    signed_eights,
    units_from,
    with_eighth_signs,
)
from localkv.quant_formats.shared.gpu.weight_layout import WeightLayout, halves, largest, load_half
from localkv.quant_formats.shared.grids import IQ2_XXS


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, qs = fields
    groups = qs.unflatten(-1, (8, 2, 4)).flatten(1, 2)
    codes = entry_words(groups[..., 0, :].flatten(1))
    bits = bits_of(groups[..., 1, :])
    signs = sign_words_beside(bits[..., :28].unflatten(-1, (4, 7)), bits[..., 28:])
    return torch.stack([codes, signs], -1).flatten(1), halves(d)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, d, table = planes
    n, at, ok = units_from(first, n_values, VALUES)
    found = load_four_words(qs, row, n, at, ok, EVEN)
    d = load_half(d, row, n_values, at, ok, EVEN, 64) * 0.125
    parts = ()
    for group in tl.static_range(2):
        q, word = found[2 * group], found[2 * group + 1]
        signs = with_eighth_signs(word)
        scale = d * (2 * other_bits(word) + 1).to(tl.float32)
        for i in tl.static_range(0, 4, 2):
            codes = signed_eights(table, byte_of(q, i), byte_of(q, i + 1), signs, i, PTX)
            parts = parts + ((codes, scale),)
    return parts


LAYOUT = WeightLayout(
    64,
    read,
    planes,
    bound=lambda p: 43 * 31 / 8 * largest(p[1]),
    table=lambda: grid_table(IQ2_XXS),
)
