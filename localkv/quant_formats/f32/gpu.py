"""f32, multiplied in three products of tf32.

As a weight: one plane, as in the file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.rows import halves, load_halves, store_rows
from localkv.quant_formats.shared.gpu.weight_layout import WeightLayout, load_floats, words
from localkv.triton_primitives.unpack import fence

PRODUCT = "tf32x3"
columns = halves


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    plane = planes[0].to(tl.pointer_type(tl.float32))
    a, b = load_halves(plane, first_row, valid, HEAD_DIM, WIDTH)
    return fence(a, PTX), fence(b, PTX)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(planes[0].to(tl.pointer_type(tl.float32)), rows, valid, x, HEAD_DIM)


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (words(fields[0].flatten(1), torch.float32),)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    return ((load_floats(planes[0], row, first, n_values, 4, VALUES, EVEN),),)


LAYOUT = WeightLayout(4, read, planes, bound=None, is_exact=True)
