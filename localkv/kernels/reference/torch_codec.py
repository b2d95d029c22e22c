"""The formats' NumPy references, called with torch tensors in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.quant_formats.shared.codebooks import codec_of


def tensor_of(array: NDArray[Any]) -> Tensor:
    """A view of an array, or a copy of one that is read-only, which torch has no tensors for."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def encode(fmt: QuantFormat, x: Tensor, codebook: Tensor | None = None) -> tuple[Tensor, ...]:
    """[..., n] of any float type -> planes, uint8 [..., n_blocks, plane bytes] each.

    Args:
        codebook: float32 [20] (`table_of`), of types with one.
    """
    with_codebook = codec_of(fmt, None if codebook is None else codebook.tolist())
    return tuple(map(tensor_of, with_codebook.encode(x.float().numpy())))


def decode(fmt: QuantFormat, planes: Iterable[Tensor], codebook: Tensor | None = None) -> Tensor:
    """Planes -> float32 [..., n]; the inverse of `encode`."""
    with_codebook = codec_of(fmt, None if codebook is None else codebook.tolist())
    return tensor_of(with_codebook.decode([plane.numpy() for plane in planes]))


def decoded(weight: PackedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """All values of a tensor; they may be a view of its rows."""
    return tensor_of(weight.decode()).to(dtype)
