"""Common parts of types with blocks of 256 values: codes in runs of 16, small scales in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.formats.gpu.bits import bit_fields, pack_bits, q4_k_codes
from localkv.formats.gpu.weight_layout import load_items, words


def in_runs(field: Tensor, n_bits: int, run: int) -> Tensor:
    """Codes packed in runs of `run` bytes, uint8 [rows, blocks, bytes] -> [rows, n], runs of 16."""
    return pack_bits(bit_fields(field, n_bits, run).flatten(1), n_bits, run=16)


def six_bit_planes(codes: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [rows, n] -> their low four and their high two bits, in the order of the codes."""
    return pack_bits(codes & 15, n_bits=4, run=1), pack_bits(codes >> 4, n_bits=2, run=1)


def halves(field: Tensor) -> Tensor:
    """A field of one fp16 number a block, as a plane."""
    return words(field.flatten(1), torch.float16)


def scales_and_minima(
    fields: Sequence[Tensor], low: torch.dtype, high: torch.dtype
) -> tuple[Tensor, ...]:
    """Of q4_K or q5_K: planes of their low and high bits, of d and of dmin.

    A scale and the minimum of the same group follow each other, in words of the types given.
    """
    d, dmin, scales = fields[:3]
    codes = torch.stack(q4_k_codes(scales), dim=-1).flatten(1)
    lows, highs = six_bit_planes(codes)
    return words(lows, low), words(highs, high), halves(d), halves(dmin)


@triton.jit
def six_bits(low, high, INDEX: tl.constexpr):
    """int32 words of `six_bit_planes` -> int32, code INDEX of a word."""
    return ((low >> (4 * INDEX)) & 15) | (((high >> (2 * INDEX)) & 3) << 4)


@triton.jit
def load_half(plane, row, n_values, at, ok, EVEN: tl.constexpr, UNIT: tl.constexpr):
    """fp32 [rows, units]: the number of the super block to which units `at` belong."""
    return load_items(plane, row, n_values // 256, at // (256 // UNIT), ok, EVEN).to(tl.float32)
