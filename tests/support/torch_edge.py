"""Between tests, whose references are torch, and the CPU's code, whose arrays are NumPy's.

Conversions are views: what one side writes the other reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localkv.cache.kv_cache import KVCache, uniform_cache
from localkv.cache.layout import SegmentSpec
from localkv.kernels.reference.torch_arrays import TorchArrays


def numpy_of(value: Any) -> Any:
    """A value with NumPy arrays for tensors, in tuples, lists and dataclasses, too."""
    if isinstance(value, Tensor):
        return value.detach().numpy()
    if isinstance(value, tuple | list):
        return type(value)(map(numpy_of, value)) if not hasattr(value, "_fields") else value
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        new = {name: numpy_of(part) for name, part in parts.items()}
        if all(new[name] is part for name, part in parts.items()):
            return value
        return type(value)(**new)
    return value


def torch_of(value: Any) -> Any:
    """A value with tensors for NumPy arrays, in tuples, too."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, tuple):
        return tuple(map(torch_of, value))
    return value


def with_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of NumPy arrays as one of tensors."""

    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        options = {name: numpy_of(option) for name, option in options.items()}
        return torch_of(function(*map(numpy_of, args), **options))

    return called


def torch_cache(
    *,
    n_layers: int,
    n_kv_heads: int,
    head_dim: int,
    segments: Iterable[SegmentSpec],
    device: torch.device | str = "cpu",
    **options: Any,
) -> KVCache:
    """A cache of layers that are all alike, without a model; `options` as `KVCache` takes them."""
    return uniform_cache(
        TorchArrays(device),
        n_layers=n_layers,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        segments=segments,
        **options,
    )
