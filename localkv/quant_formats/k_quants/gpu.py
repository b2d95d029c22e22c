"""K-quants on a GPU: codes in runs of 16 bytes, scales in words of a unit."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    bit_fields,
    fifth_bits,
    halves,
    in_runs,
    largest,
    load_half,
    load_items,
    load_runs,
    six_bit_planes,
    six_bits,
    two_parts,
    units_from,
    words,
)
from localkv.triton_primitives.unpack import unpack_bit_field, unpack_nibbles


def planes_q2_k(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Bits 2 p and 2 p + 1 of byte i of a run belong to value 16 p + i of a unit of 64; its four
    scales and minima, four bits each, are a word."""
    scales, qs, d, dmin = fields
    return in_runs(qs, 2, run=32), words(scales.flatten(1), torch.int32), halves(d), halves(dmin)


@triton.jit
def read_q2_k(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, scales, d, dmin = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
    q = load_runs(qs, row, n, at, ok, EVEN)
    word = load_items(scales, row, n, at, ok, EVEN)
    d = load_half(d, row, n_values, at, ok, EVEN, 64)
    dmin = load_half(dmin, row, n_values, at, ok, EVEN, 64)
    parts = ()
    for part in tl.static_range(4):
        codes = unpack_bit_field(q, q, 2 * part, 2, 0, 0, 0, PTX)
        scale = d * ((word >> (8 * part)) & 15).to(tl.float32)
        minimum = -dmin * ((word >> (8 * part + 4)) & 15).to(tl.float32)
        parts = parts + ((codes, scale, minimum),)
    return parts


q2_k = SimpleNamespace(
    LAYOUT=WeightLayout(
        64, read_q2_k, planes_q2_k, bound=lambda p: 15 * (3 * largest(p[2]) + largest(p[3]))
    )
)


def q3_k_codes(scales: Tensor) -> Tensor:
    """`k_quants.q3_k_codes` of a tensor: uint8 [..., n_blocks, 12] -> [..., 16]."""
    low = bit_fields(scales[..., :8], n_bits=4, run=8)
    return low | (bit_fields(scales[..., 8:], n_bits=2, run=4) << 4)


def planes_q3_k(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Low bits are laid out as q2_K's codes, and a plane of third bits as q5_0's of fifth ones.
    Scales are split into their low four and high two bits, a word each for a unit of 128."""
    hmask, qs, scales, d = fields
    low, high = six_bit_planes(q3_k_codes(scales).flatten(1))
    return (
        in_runs(qs, 2, run=32),
        in_runs(hmask, 1, run=32),
        words(low, torch.int32),
        words(high, torch.int16),
        halves(d),
    )


@triton.jit
def read_q3_k(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, hmask, lows, highs, d = planes
    n, at, ok = units_from(first, n_values, 128, VALUES)
    above = load_runs(hmask, row, n, at, ok, EVEN)
    low = load_items(lows, row, n, at, ok, EVEN)
    high = load_items(highs, row, n, at, ok, EVEN).to(tl.int32)
    d = load_half(d, row, n_values, at, ok, EVEN, 128)
    parts = ()
    for half in tl.static_range(2):
        q = load_runs(qs, row, 2 * n, 2 * at + half, ok, EVEN)
        for quarter in tl.static_range(4):
            codes = unpack_bit_field(q, above, 2 * quarter, 2, 4 * half + quarter, 1, 4, PTX)
            scale = six_bits(low, high, 4 * half + quarter) - 32
            parts = parts + ((codes, d * scale.to(tl.float32)),)
    return parts


q3_k = SimpleNamespace(
    LAYOUT=WeightLayout(128, read_q3_k, planes_q3_k, bound=lambda p: 32 * 4 * largest(p[4]))
)


def scales_and_minima(
    fields: Sequence[Tensor], low: torch.dtype, high: torch.dtype
) -> tuple[Tensor, ...]:
    """Planes of q4_K or q5_K: low and high bits of scales (`k_quants.q4_k_scales`), d and dmin.

    A scale and the minimum of the same group follow each other, in words of the types given.
    """
    d, dmin, scales = fields[:3]
    firsts, seconds, nibbles = scales[..., 0:4], scales[..., 4:8], scales[..., 8:12]
    scale = torch.cat([firsts & 63, (nibbles & 15) | ((firsts >> 6) << 4)], dim=-1)
    minimum = torch.cat([seconds & 63, (nibbles >> 4) | ((seconds >> 6) << 4)], dim=-1)
    lows, highs = six_bit_planes(torch.stack((scale, minimum), dim=-1).flatten(1))
    return words(lows, low), words(highs, high), halves(d), halves(dmin)


def planes_q4_k(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Codes as q4_0's; a plane each of the low and high bits of scales, of d and of dmin."""
    return in_runs(fields[3], 4, run=32), *scales_and_minima(fields, torch.int16, torch.uint8)


@triton.jit
def read_q4_k(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, lows, highs, d, dmin = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
    low = load_items(lows, row, n, at, ok, EVEN).to(tl.int32)
    high = load_items(highs, row, n, at, ok, EVEN).to(tl.int32)
    d = load_half(d, row, n_values, at, ok, EVEN, 64)
    dmin = load_half(dmin, row, n_values, at, ok, EVEN, 64)
    parts = ()
    for group in tl.static_range(2):
        q = load_runs(qs, row, 2 * n, 2 * at + group, ok, EVEN)
        a, b = unpack_nibbles(q, 0, PTX)
        scale = d * six_bits(low, high, 2 * group).to(tl.float32)
        minimum = -dmin * six_bits(low, high, 2 * group + 1).to(tl.float32)
        parts = parts + ((a, scale, minimum), (b, scale, minimum))
    return parts


q4_k = SimpleNamespace(
    LAYOUT=WeightLayout(
        64, read_q4_k, planes_q4_k, bound=lambda p: 63 * (15 * largest(p[3]) + largest(p[4]))
    )
)


def planes_q5_k(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Codes as q5_0's, scales as q4_K's."""
    qh, qs = fields[3:]
    scales = scales_and_minima(fields, torch.int32, torch.int16)
    return in_runs(qs, 4, run=32), fifth_bits(qh, run=32), *scales


@triton.jit
def read_q5_k(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, qh, lows, highs, d, dmin = planes
    n, at, ok = units_from(first, n_values, 128, VALUES)
    low = load_items(lows, row, n, at, ok, EVEN)
    high = load_items(highs, row, n, at, ok, EVEN).to(tl.int32)
    d = load_half(d, row, n_values, at, ok, EVEN, 128)
    dmin = load_half(dmin, row, n_values, at, ok, EVEN, 128)
    above = load_runs(qh, row, n, at, ok, EVEN)
    parts = ()
    for group in tl.static_range(4):
        a, b = two_parts(qs, above, row, n, at, ok, 2 * group, 0, EVEN, PTX)
        scale = d * six_bits(low, high, 2 * group).to(tl.float32)
        minimum = -dmin * six_bits(low, high, 2 * group + 1).to(tl.float32)
        parts = parts + ((a, scale, minimum), (b, scale, minimum))
    return parts


q5_k = SimpleNamespace(
    LAYOUT=WeightLayout(
        128, read_q5_k, planes_q5_k, bound=lambda p: 63 * (31 * largest(p[4]) + largest(p[5]))
    )
)


def planes_q6_k(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Low bits are laid out as q4_0's. Bits 2 p and 2 p + 1 of byte i of a run of high bits belong
    to value 16 p + i of a unit of 64. The four scales of a unit are a word."""
    ql, qh, scales, d = fields
    low, high = in_runs(ql, 4, run=64), in_runs(qh, 2, run=32)
    return low, high, words(scales.flatten(1), torch.int32), halves(d)


@triton.jit
def read_q6_k(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    ql, qh, scales, d = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
    above = load_runs(qh, row, n, at, ok, EVEN)
    word = load_items(scales, row, n, at, ok, EVEN)
    d = load_half(d, row, n_values, at, ok, EVEN, 64)
    parts = ()
    for group in tl.static_range(2):
        q = load_runs(ql, row, 2 * n, 2 * at + group, ok, EVEN)
        for half in tl.static_range(2):
            codes = unpack_bit_field(q, above, 4 * half, 4, 4 * group + 2 * half, 2, 32, PTX)
            scale = (word << (24 - 16 * group - 8 * half)) >> 24
            parts = parts + ((codes, d * scale.to(tl.float32)),)
    return parts


q6_k = SimpleNamespace(
    LAYOUT=WeightLayout(64, read_q6_k, planes_q6_k, bound=lambda p: 128 * 32 * largest(p[3]))
)
