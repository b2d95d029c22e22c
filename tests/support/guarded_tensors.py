"""Guarded memory for what torch allocates: outputs of the GPU's launchers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from support.guarded_memory import GuardedMemory, Part

NUMPY = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
}


def _guarded_tensors(memory: GuardedMemory) -> Iterator[Any]:
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty

    def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        what = f"an output {list(shape)}"
        return torch.from_numpy(memory.empty(tuple(shape), what, NUMPY[dtype]))

    def our_empty(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        if options or (dtype or torch.float32) not in NUMPY:
            return empty(*size, dtype=dtype, **options)
        return guarded(shape, dtype or torch.float32)

    def our_empty_like(x: Tensor, **options: Any) -> Tensor:
        if options or x.dtype not in NUMPY:
            return empty_like(x, **options)
        return guarded(x.shape, x.dtype)

    def our_new_empty(x: Tensor, *size: Any, **options: Any) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        if options or x.dtype not in NUMPY:
            return new_empty(x, *size, **options)
        return guarded(shape, x.dtype)

    yield patch.object(torch, "empty", our_empty)
    yield patch.object(torch, "empty_like", our_empty_like)
    yield patch.object(Tensor, "new_empty", our_new_empty)


TENSORS: tuple[Part, ...] = (_guarded_tensors,)
