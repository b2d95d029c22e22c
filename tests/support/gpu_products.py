"""Weights as a GPU keeps them, and the error of products with them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from localkv.kernels.gpu.products.plane_tensor import PlaneTensor, prepare
from localkv.quant_formats.packed_tensor import PackedTensor
from support.random_packed import random_packed

CPU = torch.device("cpu")
EXACT = 1e-6


def with_rows(weight: PackedTensor) -> PlaneTensor:
    """Prepared, and yet with the file's rows, which the reference reads."""
    return replace(prepare(weight, CPU), rows=weight.rows)


def prepared(name: str, *shape: int, seed: int = 0) -> PlaneTensor:
    return with_rows(random_packed(name, *shape, seed=seed))


def error(got: Tensor, want: Tensor) -> float:
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm())


def far(weight: PlaneTensor) -> PlaneTensor:
    """The last rows, or the last of a stack, whose offsets have more than 31 bits.

    The others are never touched, and so take no memory.
    """
    n_rows = len(weight.planes[0])
    n_times = 2**31 // (n_rows * max(plane[0].numel() for plane in weight.planes)) + 2

    def repeated(plane: Tensor) -> Tensor:
        planes = torch.empty(n_times * n_rows, *plane.shape[1:], dtype=plane.dtype)
        planes[-n_rows:] = plane
        return planes

    shape = (n_times * weight.shape[0], *weight.shape[1:])
    there = replace(weight, planes=tuple(map(repeated, weight.planes)), shape=shape)
    assert there.needs_wide_index
    return there
