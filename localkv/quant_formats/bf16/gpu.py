"""bf16, widened by its bits and multiplied as tf32, which holds it.

As a weight: one plane, as in the file; read as the upper half of fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.rows import halves, load_halves, store_rows
from localkv.quant_formats.shared.gpu.weight_layout import WeightLayout, largest, load_floats, words
from localkv.triton_primitives.float_bits import decode_bf16, encode_bf16
from localkv.triton_primitives.unpack import fence

PRODUCT = "tf32"
columns = halves


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    plane = planes[0].to(tl.pointer_type(tl.uint16))
    a, b = load_halves(plane, first_row, valid, HEAD_DIM, WIDTH)
    return fence(decode_bf16(a), PTX), fence(decode_bf16(b), PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(planes[0].to(tl.pointer_type(tl.uint16)), rows, valid, encode_bf16(x), HEAD_DIM)


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (words(fields[0].flatten(1), torch.uint16),)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    codes = decode_bf16(load_floats(planes[0], row, first, n_values, 8, VALUES, EVEN))
    return ((codes,),)


LAYOUT = WeightLayout(8, read, planes, bound=lambda p: largest(p[0].view(torch.bfloat16)))
