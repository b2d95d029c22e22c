"""Weights of one or two bits on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.weight_layout import (
    WeightLayout,
    halves,
    in_runs,
    largest,
    load_half,
    load_items,
    load_runs,
    units_from,
    words,
)
from localkv.triton_primitives.unpack import plus_1024, unpack_bit_field, unpack_five_digits


def planes_q1_0(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Bit p of byte i of a run belongs to value 16 p + i of a unit of 128."""
    d, qs = fields
    return in_runs(qs, 1, run=1), halves(d)


@triton.jit
def read_q1_0(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, d = planes
    n, at, ok = units_from(first, n_values, 128, VALUES)
    q = load_runs(qs, row, n, at, ok, EVEN)
    scale, none = load_items(d, row, n, at, ok, EVEN).to(tl.float32), q & 0
    parts = ()
    for part in tl.static_range(8):  # twice a bit, less 1
        parts = parts + ((unpack_bit_field(none, q, 0, 1, part, 1, 1, PTX), scale),)
    return parts


q1_0 = SimpleNamespace(
    LAYOUT=WeightLayout(128, read_q1_0, planes_q1_0, bound=lambda p: largest(p[1]))
)


def planes_q2_0(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Bits 2 p and 2 p + 1 of byte i of a run belong to value 16 p + i of a unit of 64."""
    d, qs = fields
    return in_runs(qs, 2, run=1), halves(d)


@triton.jit
def read_q2_0(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, d = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
    q = load_runs(qs, row, n, at, ok, EVEN)
    scale = load_items(d, row, n, at, ok, EVEN).to(tl.float32)
    parts = ()
    for part in tl.static_range(4):
        parts = parts + ((unpack_bit_field(q, q, 2 * part, 2, 0, 0, 1, PTX), scale),)
    return parts


q2_0 = SimpleNamespace(
    LAYOUT=WeightLayout(64, read_q2_0, planes_q2_0, bound=lambda p: 2 * largest(p[1]))
)


def planes_tq1_0(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """In units of 256, three runs of five digits a byte, and a word of the last 16 values."""
    qs, qh, d = fields
    last, rest = torch.zeros_like(qh), qh
    for digit in range(4):
        product = rest.to(torch.int16) * 3
        last = last | ((product >> 8) << (2 * digit)).to(torch.uint8)
        rest = product.to(torch.uint8)
    last = words(last.flatten(1), torch.int32)
    return qs.flatten(1).contiguous(), last, halves(d)


@triton.jit
def read_tq1_0(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, last, d = planes
    n, at, ok = units_from(first, n_values, 256, VALUES)
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


tq1_0 = SimpleNamespace(
    LAYOUT=WeightLayout(256, read_tq1_0, planes_tq1_0, bound=lambda p: largest(p[2]))
)


def planes_tq2_0(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Bits 2 p and 2 p + 1 of byte i of a run belong to value 16 p + i of a unit of 64."""
    qs, d = fields
    return in_runs(qs, 2, run=32), halves(d)


@triton.jit
def read_tq2_0(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    qs, d = planes
    n, at, ok = units_from(first, n_values, 64, VALUES)
    q = load_runs(qs, row, n, at, ok, EVEN)
    scale = load_half(d, row, n_values, at, ok, EVEN, 64)
    parts = ()
    for part in tl.static_range(4):
        parts = parts + ((unpack_bit_field(q, q, 2 * part, 2, 0, 0, 1, PTX), scale),)
    return parts


tq2_0 = SimpleNamespace(
    LAYOUT=WeightLayout(64, read_tq2_0, planes_tq2_0, bound=lambda p: 2 * largest(p[1]))
)
