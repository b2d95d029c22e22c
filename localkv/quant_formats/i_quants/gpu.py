"""I-quants on a GPU: look-ups in a grid, and signs.

A grid is a table of bytes in the GPU's memory, 1 to 16 KiB, which the first-level cache holds: a
thread loads the 4 or 8 values of an entry at once. Levels packed into fewer bits would take more
instructions to unpack than an entry takes to load, and a table of fp16 numbers twice the cache's
bandwidth. Units are of 64 values, in eight parts of 8: what a thread loads of codes and signs
decides how the parts lie, so that nothing is exchanged between threads.

The signs of 32 values are a word: the signs of even values are in its lower half, in order, and the
signs of odd values in the upper. A shift brings a pair's to where fp16 has them, bits 15 and 31.
Types that store seven signs of eight have other bits in place of each eighth.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.i_quants import IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, Grid
from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    halves,
    largest,
    load_half,
    load_items,
    units_from,
    words,
)
from localkv.triton_primitives.unpack import unpack_shifted_points, unpack_signed_points


def grid_table(grid: Grid, factor: int = 1, offset: int = 0) -> Tensor:
    """A grid's values times `factor` plus `offset`, uint8 [entries * values]."""
    return torch.from_numpy((grid.points * factor + offset).astype("uint8").reshape(-1))


def entry_words(codes: Tensor) -> Tensor:
    """Lower bytes of codes, uint8 [rows, n] -> int32 [rows, n / 4]."""
    return words(codes, torch.int32)


def bits_of(field: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 8 n] of 0 and 1, the lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=field.device)
    return ((field[..., None] >> shifts) & 1).flatten(-2)


def words_of_bits(bits: Tensor) -> Tensor:
    """uint8 [rows, ..., 32] of 0 and 1 -> int32 [rows, words], the lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    packed = (bits.unflatten(-1, (4, 8)) << shifts).sum(-1, dtype=torch.uint8)
    return words(packed.flatten(1), torch.int32)


def sign_words(bits: Tensor) -> Tensor:
    """Signs of 32 values each, uint8 [rows, groups, 32] -> int32 [rows, groups]."""
    return words_of_bits(torch.cat([bits[..., 0::2], bits[..., 1::2]], -1))


def sign_words_beside(bits: Tensor, others: Tensor) -> Tensor:
    """Seven signs of each eight values, uint8 [rows, groups, 4, 7], and other bits, [..., 4]."""
    return sign_words(torch.cat([bits, others[..., None]], -1).flatten(-2))


@triton.jit
def load_words(plane, row, per_row, at, ok, N: tl.constexpr, EVEN: tl.constexpr):
    """int32 [rows, units, N]: words N * `at` [units] and the next ones of each row."""
    first = row[:, None] * per_row + at[None, :] * N
    pointers = plane + first[:, :, None] + tl.arange(0, N)[None, None, :]
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=ok[None, :, None], other=0)


@triton.jit
def load_beside(plane, row, per_row, at, ok, EVEN: tl.constexpr):
    """[rows, units]: items `at` [units], held by the threads that hold the words of those units."""
    found = load_words(plane, row, per_row, at, ok, 1, EVEN)
    return tl.reshape(found, (found.shape[0], found.shape[1]))


@triton.jit
def load_two_words(plane, row, n, at, ok, EVEN: tl.constexpr):
    """Twice int32 [rows, units]: the words of units `at`; a row has `n` units."""
    return tl.split(load_words(plane, row, 2 * n, at, ok, 2, EVEN))


@triton.jit
def load_four_words(plane, row, n, at, ok, EVEN: tl.constexpr):
    """Four times int32 [rows, units]: the words of units `at`; a row has `n` units."""
    found = load_words(plane, row, 4 * n, at, ok, 4, EVEN)
    even, odd = tl.split(tl.reshape(found, (found.shape[0], found.shape[1], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def with_eighth_signs(word):
    """A word of signs whose eighth ones make the number of signs of each eight even."""
    word = word & 0x7777FFFF
    parity = word ^ (word >> 16)
    parity = parity ^ (parity >> 2)
    parity = parity ^ (parity >> 1)
    return word | ((parity & 0x1111) << 19)


@triton.jit
def other_bits(word):
    """The four bits that a word of signs has in place of the eighth ones: int32."""
    return ((((word >> 19) & 0x1111) * 0x1248) >> 12) & 15


@triton.jit
def byte_of(word, INDEX: tl.constexpr):
    return (word >> (8 * INDEX)) & 255


@triton.jit
def load_entry(table, entry, N: tl.constexpr):
    """uint8 [rows, units, N]: the values of `entry` [rows, units] of a grid."""
    return tl.load(table + entry[:, :, None] * N + tl.arange(0, N)[None, None, :])


@triton.jit
def one_after_another(a, b):
    """[rows, units, n] twice -> [rows, units, 2 n]."""
    joined = tl.permute(tl.join(a, b), (0, 1, 3, 2))
    return tl.reshape(joined, (a.shape[0], a.shape[1], 2 * a.shape[2]))


@triton.jit
def signed_eights(table, a, b, signs, FIRST: tl.constexpr, PTX: tl.constexpr):
    """fp16 [rows, units, 16]: entries `a` and `b` of 8 magnitudes each, with the signs of eights
    FIRST and FIRST + 1 of a word."""
    word = signs[:, :, None]
    return one_after_another(
        unpack_signed_points(load_entry(table, a, 8), word, 4 * FIRST, PTX),
        unpack_signed_points(load_entry(table, b, 8), word, 4 * FIRST + 4, PTX),
    )


@triton.jit
def _signed_fours(table, a, b, word, FIRST: tl.constexpr, PTX: tl.constexpr):
    return one_after_another(
        unpack_signed_points(load_entry(table, a, 4), word, FIRST, PTX),
        unpack_signed_points(load_entry(table, b, 4), word, FIRST + 2, PTX),
    )


@triton.jit
def signed_fours(table, entries, signs, FIRST: tl.constexpr, PTX: tl.constexpr):
    """Signed values of four entries of 4 magnitudes each."""
    word = signs[:, :, None]
    return one_after_another(
        _signed_fours(table, entries[0], entries[1], word, 4 * FIRST, PTX),
        _signed_fours(table, entries[2], entries[3], word, 4 * FIRST + 4, PTX),
    )


@triton.jit
def shifted_eights(table, a, b, offset_a, offset_b, PTX: tl.constexpr):
    """fp16 [rows, units, 16]: entries `a` and `b` of 8 values each, less offsets of their own, as
    `unpack_shifted_points` takes them."""
    return one_after_another(
        unpack_shifted_points(load_entry(table, a, 8), offset_a[:, :, None], PTX),
        unpack_shifted_points(load_entry(table, b, 8), offset_b[:, :, None], PTX),
    )


CENTRE = 8
"""What bytes are more than eight times the grid's values."""
UPPER = tl.constexpr(0x6400_6400 + (CENTRE - 1) * 0x1_0001)
"""Twice 1024 + 7 in fp16: values are an eighth more."""


@triton.jit
def offset_of(is_lower):
    """int32: what `unpack_shifted_points` subtracts, by the lowest bit of `is_lower`."""
    return (is_lower & 1) * 0x2_0002 + UPPER


def planes_iq3_s(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Runs of 16 codes for 64 values, two words of signs, codes' ninth bits, and two scales."""
    d, qs, qh, signs, scales = fields
    bits = bits_of(signs.flatten(1).unflatten(1, (-1, 4)))
    ninth = words(qh.flatten(1), torch.int16)
    codes = entry_words(qs.flatten(1))
    return codes, sign_words(bits), ninth, scales.flatten(1).contiguous(), halves(d)


@triton.jit
def read_iq3_s(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, signs, qh, scales, d, table = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
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


iq3_s = SimpleNamespace(
    LAYOUT=WeightLayout(
        64,
        read_iq3_s,
        planes_iq3_s,
        bound=lambda p: 15 * 31 * largest(p[4]),
        table=lambda: grid_table(IQ3_S),
    )
)


def planes_iq3_xxs(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Runs of 16 codes for 64 values, and two words of signs with a scale each."""
    d, qs, signs = fields
    bits = bits_of(signs.flatten(1).unflatten(1, (-1, 4)))
    both = sign_words_beside(bits[..., :28].unflatten(-1, (4, 7)), bits[..., 28:])
    return entry_words(qs.flatten(1)), both, halves(d)


@triton.jit
def read_iq3_xxs(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, signs, d, table = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
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


iq3_xxs = SimpleNamespace(
    LAYOUT=WeightLayout(
        64,
        read_iq3_xxs,
        planes_iq3_xxs,
        bound=lambda p: 62 * 31 / 4 * largest(p[2]),
        table=lambda: grid_table(IQ3_XXS),
    )
)


def planes_iq2_s(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Runs of 16 bytes for 64 values, a word of codes and one of signs, twice; a word of codes'
    upper bits and scales."""
    d, qs, signs, qh, scales = fields
    codes = entry_words(qs.flatten(1))
    both = torch.stack([codes, sign_words(bits_of(signs.flatten(1).unflatten(1, (-1, 4))))], -1)
    small = torch.stack([qh.unflatten(-1, (4, 2)), scales.unflatten(-1, (4, 2))], -2)
    return both.flatten(1), words(small.flatten(1), torch.int32), halves(d)


@triton.jit
def read_iq2_s(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, small, d, table = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
    found = load_four_words(qs, row, n, at, ok, EVEN)
    above = load_beside(small, row, n, at, ok, EVEN)
    d = load_half(d, row, n_values, at, ok, EVEN, 64) * 0.125
    parts = ()
    for group in tl.static_range(2):
        q, signs = found[2 * group], found[2 * group + 1]
        for i in tl.static_range(0, 4, 2):
            a = byte_of(q, i) | (((above >> (8 * group + 2 * i)) & 3) << 8)
            b = byte_of(q, i + 1) | (((above >> (8 * group + 2 * i + 2)) & 3) << 8)
            scale = d * (2 * ((above >> (16 + 8 * group + 2 * i)) & 15) + 1).to(tl.float32)
            parts = parts + ((signed_eights(table, a, b, signs, i, PTX), scale),)
    return parts


iq2_s = SimpleNamespace(
    LAYOUT=WeightLayout(
        64,
        read_iq2_s,
        planes_iq2_s,
        bound=lambda p: 43 * 31 / 8 * largest(p[2]),
        table=lambda: grid_table(IQ2_S),
    )
)


def planes_iq2_xs(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Runs of 16 bytes for 64 values, a word of codes and one of signs and codes' ninth bits,
    twice; a word of scales."""
    d, qs, scales = fields
    pairs = qs.unflatten(-1, (32, 2)).flatten(1, 2)
    codes = entry_words(pairs[..., 0].flatten(1))
    bits = bits_of(pairs[..., 1]).unflatten(1, (-1, 4, 8))
    signs = sign_words_beside(bits[..., 1:], bits[..., 0])
    both = torch.stack([codes, signs], -1).flatten(1)
    return both, words(scales.flatten(1), torch.int16), halves(d)


@triton.jit
def read_iq2_xs(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, scales, d, table = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
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


iq2_xs = SimpleNamespace(
    LAYOUT=WeightLayout(
        64,
        read_iq2_xs,
        planes_iq2_xs,
        bound=lambda p: 43 * 31 / 8 * largest(p[2]),
        table=lambda: grid_table(IQ2_XS),
    )
)


def planes_iq2_xxs(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Runs of 16 bytes for 64 values, a word of codes and one of signs and a scale, twice."""
    d, qs = fields
    groups = qs.unflatten(-1, (8, 2, 4)).flatten(1, 2)
    codes = entry_words(groups[..., 0, :].flatten(1))
    bits = bits_of(groups[..., 1, :])
    signs = sign_words_beside(bits[..., :28].unflatten(-1, (4, 7)), bits[..., 28:])
    return torch.stack([codes, signs], -1).flatten(1), halves(d)


@triton.jit
def read_iq2_xxs(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, d, table = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
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


iq2_xxs = SimpleNamespace(
    LAYOUT=WeightLayout(
        64,
        read_iq2_xxs,
        planes_iq2_xxs,
        bound=lambda p: 43 * 31 / 8 * largest(p[1]),
        table=lambda: grid_table(IQ2_XXS),
    )
)


def planes_iq1_m(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Two words of codes' lower bytes for 64 values, one of upper bits and shifts; scales as in the
    file, a quarter of d's bits above each four."""
    qs, qh, scales = fields
    upper, small = words(qh.flatten(1), torch.int32), words(scales.flatten(1), torch.int16)
    return entry_words(qs.flatten(1)), upper, small


@triton.jit
def scale_of_block_iq1_m(scales, row, n, at, ok, EVEN: tl.constexpr):
    """fp32 [rows, units]: d of the super blocks to which units `at` belong."""
    bits = tl.zeros((row.shape[0], at.shape[0]), tl.int32)
    for quarter in tl.static_range(4):
        word = load_items(scales, row, n, at // 4 * 4 + quarter, ok, EVEN).to(tl.int32)
        bits = bits | (((word >> 12) & 15) << (4 * quarter))
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def read_iq1_m(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, qh, scales, table = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
    found = load_two_words(qs, row, n, at, ok, EVEN)
    above = load_beside(qh, row, n, at, ok, EVEN)
    small = load_items(scales, row, n, at, ok, EVEN).to(tl.int32)
    d = scale_of_block_iq1_m(scales, row, n, at, ok, EVEN) * 0.125
    parts = ()
    for part in tl.static_range(4):
        q, word = found[part // 2], above >> (8 * part)
        a = byte_of(q, 2 * (part % 2)) | ((word & 7) << 8)
        b = byte_of(q, 2 * (part % 2) + 1) | (((word >> 4) & 7) << 8)
        codes = shifted_eights(table, a, b, offset_of(word >> 3), offset_of(word >> 7), PTX)
        parts = parts + ((codes, d * (2 * ((small >> (3 * part)) & 7) + 1).to(tl.float32)),)
    return parts


def bound_iq1_m(planes: tuple[Tensor, ...]) -> Tensor:
    quarters = (planes[2].unflatten(1, (-1, 4)) >> 12).to(torch.int32) & 15
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=quarters.device)
    d = (quarters << shifts).sum(-1).to(torch.int16).view(torch.float16)
    return 9 * 15 / 8 * largest(d)


iq1_m = SimpleNamespace(
    LAYOUT=WeightLayout(
        64, read_iq1_m, planes_iq1_m, bound_iq1_m, table=lambda: grid_table(IQ1, 8, CENTRE)
    )
)


def planes_iq1_s(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Two words of codes' lower bytes for 64 values, and one of all else but d."""
    d, qs, qh = fields
    return entry_words(qs.flatten(1)), words(qh.flatten(1), torch.int32), halves(d)


@triton.jit
def read_iq1_s(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, qh, d, table = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
    found = load_two_words(qs, row, n, at, ok, EVEN)
    above = load_beside(qh, row, n, at, ok, EVEN)
    d = load_half(d, row, n_values, at, ok, EVEN, 64) * 0.125
    parts = ()
    for group in tl.static_range(2):
        q, word = found[group], above >> (16 * group)
        scale = d * (2 * ((word >> 12) & 7) + 1).to(tl.float32)
        offset = offset_of(word >> 15)
        for i in tl.static_range(0, 4, 2):
            a = byte_of(q, i) | (((word >> (3 * i)) & 7) << 8)
            b = byte_of(q, i + 1) | (((word >> (3 * i + 3)) & 7) << 8)
            parts = parts + ((shifted_eights(table, a, b, offset, offset, PTX), scale),)
    return parts


iq1_s = SimpleNamespace(
    LAYOUT=WeightLayout(
        64,
        read_iq1_s,
        planes_iq1_s,
        bound=lambda p: 9 * 15 / 8 * largest(p[2]),
        table=lambda: grid_table(IQ1, 8, CENTRE),
    )
)
