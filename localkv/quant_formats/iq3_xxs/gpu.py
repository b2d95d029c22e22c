"""iq3_xxs: runs of 16 codes for 64 values, and two words of signs with a scale each."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.grid_points import (
    bits_of,
    byte_of,
    entry_words,
    grid_table,
    load_four_words,
    load_two_words,
    other_bits,
    sign_words_beside,
    signed_fours,
    units_from,
    with_eighth_signs,
)
from localkv.quant_formats.shared.gpu.weight_layout import WeightLayout, halves, largest, load_half
from localkv.quant_formats.shared.grids import IQ3_XXS


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    d, qs, signs = fields
    bits = bits_of(signs.flatten(1).unflatten(1, (-1, 4)))
    both = sign_words_beside(bits[..., :28].unflatten(-1, (4, 7)), bits[..., 28:])
    return entry_words(qs.flatten(1)), both, halves(d)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    qs, signs, d, table = planes
    n, at, ok = units_from(first, n_values, VALUES)
    found = load_four_words(qs, row, n, at, ok, EVEN)
    pair = load_two_words(signs, row, n, at, ok, EVEN)
    d = load_half(d, row, n_values, at, ok, EVEN, 64) * 0.25
    parts = ()
    for part in tl.static_range(4):
        q, word = found[part], pair[part // 2]
        entries = (byte_of(q, 0), byte_of(q, 1), byte_of(q, 2), byte_of(q, 3))
        codes = signed_fours(table, entries, with_eighth_signs(word), 2 * (part % 2), PTX)
        parts = parts + ((codes, d * (2 * other_bits(word) + 1).to(tl.float32)),)
    return parts


LAYOUT = WeightLayout(
    64,
    read,
    planes,
    bound=lambda p: 62 * 31 / 4 * largest(p[2]),
    table=lambda: grid_table(IQ3_XXS),
)
