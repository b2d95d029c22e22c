"""f32: one plane, as in the file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.formats.gpu.floats import load_floats
from localkv.formats.gpu.weight_layout import WeightLayout, words


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (words(fields[0].flatten(1), torch.float32),)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    return ((load_floats(planes[0], row, first, n_values, 4, VALUES, EVEN),),)


LAYOUT = WeightLayout(4, read, planes, bound=None, is_exact=True)
