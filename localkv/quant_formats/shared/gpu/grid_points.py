"""Common parts of the types whose codes select from a grid: look-ups, and signs.

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

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.weight_layout import words
from localkv.quant_formats.shared.grids import Grid
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
def units_from(first, n_values, VALUES: tl.constexpr):
    """Units of a row, the indices of those that VALUES values from `first` on are, and which of
    these there are."""
    n = n_values // 64
    at = first // 64 + tl.arange(0, VALUES // 64)
    return n, at, at < n


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
