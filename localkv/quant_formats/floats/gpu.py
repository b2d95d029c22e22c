"""f32, f16 and bf16 on a GPU. Weights are one plane, as in the file.

f32 is multiplied in three products of tf32; bf16, read as the upper half of fp32, as tf32, which
holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from localkv.quant_formats.shared.gpu.rows import as_f16, halves, load_halves, store_rows
from localkv.quant_formats.shared.gpu.weight_layout import WeightLayout, largest, load_floats, words
from localkv.triton_primitives.float_bits import decode_bf16, encode_bf16
from localkv.triton_primitives.unpack import fence


def _plane_of(dtype: torch.dtype) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    return lambda fields: (words(fields[0].flatten(1), dtype),)


@triton.jit
def read_tile_f32(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    plane = planes[0].to(tl.pointer_type(tl.float32))
    a, b = load_halves(plane, first_row, valid, HEAD_DIM, WIDTH)
    return fence(a, PTX), fence(b, PTX)


@triton.jit
def write_rows_f32(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(planes[0].to(tl.pointer_type(tl.float32)), rows, valid, x, HEAD_DIM)


@triton.jit
def read_f32(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    return ((load_floats(planes[0], row, first, n_values, 4, VALUES, EVEN),),)


f32 = SimpleNamespace(
    PRODUCT="tf32x3",
    columns=halves,
    read_tile=read_tile_f32,
    write_rows=write_rows_f32,
    LAYOUT=WeightLayout(4, read_f32, _plane_of(torch.float32), bound=None, is_exact=True),
)


@triton.jit
def read_tile_f16(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    return load_halves(as_f16(planes[0]), first_row, valid, HEAD_DIM, WIDTH)


@triton.jit
def write_rows_f16(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(as_f16(planes[0]), rows, valid, x.to(tl.float16), HEAD_DIM)


@triton.jit
def read_f16(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    return ((load_floats(planes[0], row, first, n_values, 8, VALUES, EVEN),),)


f16 = SimpleNamespace(
    PRODUCT="fp16",
    columns=halves,
    read_tile=read_tile_f16,
    write_rows=write_rows_f16,
    LAYOUT=WeightLayout(8, read_f16, _plane_of(torch.float16), bound=None),
)


@triton.jit
def read_tile_bf16(
    planes, first_row, valid, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr
):
    plane = planes[0].to(tl.pointer_type(tl.uint16))
    a, b = load_halves(plane, first_row, valid, HEAD_DIM, WIDTH)
    return fence(decode_bf16(a), PTX), fence(decode_bf16(b), PTX)


@triton.jit
def write_rows_bf16(planes, rows, valid, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    store_rows(planes[0].to(tl.pointer_type(tl.uint16)), rows, valid, encode_bf16(x), HEAD_DIM)


@triton.jit
def read_bf16(
    planes, row, first, n_values, VALUES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr
):
    codes = decode_bf16(load_floats(planes[0], row, first, n_values, 8, VALUES, EVEN))
    return ((codes,),)


bf16 = SimpleNamespace(
    PRODUCT="tf32",
    columns=halves,
    read_tile=read_tile_bf16,
    write_rows=write_rows_bf16,
    LAYOUT=WeightLayout(
        8, read_bf16, _plane_of(torch.uint16), bound=lambda p: largest(p[0].view(torch.bfloat16))
    ),
)
