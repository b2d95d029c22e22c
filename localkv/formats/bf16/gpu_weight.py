"""bf16: one plane, as in the file; read as the upper half of fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.formats.gpu.floats import load_floats
from localkv.formats.gpu.weight_layout import WeightLayout, largest, words
from localkv.triton_primitives.float_bits import decode_bf16


def planes(fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (words(fields[0].flatten(1), torch.uint16),)


@triton.jit
def read(planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr):
    codes = decode_bf16(load_floats(planes[0], row, first, n_values, 8, VALUES, EVEN))
    return ((codes,),)


LAYOUT = WeightLayout(8, read, planes, bound=lambda p: largest(p[0].view(torch.bfloat16)))
