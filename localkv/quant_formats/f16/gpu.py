"""f16.

As a weight: one plane, as in the file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.rows import as_f16, halves, load_halves, store_rows
from localkv.quant_formats.shared.gpu.weight_layout import WeightLayout, load_floats, words

PRODUCT = "fp16"
columns = halves


@triton.jit
def read_tile(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    return load_halves(as_f16(planes[0]), first_row, valid, HEAD_DIM, WIDTH)


@triton.jit
def write_rows(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(as_f16(planes[0]), rows, valid, x.to(tl.float16), HEAD_DIM)


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (words(fields[0].flatten(1), torch.float16),)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    return ((load_floats(planes[0], row, first, n_values, 8, VALUES, EVEN),),)


LAYOUT = WeightLayout(8, read, planes, bound=None)
