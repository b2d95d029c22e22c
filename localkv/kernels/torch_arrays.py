"""`Arrays` of torch, on a device, and caches in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import SegmentSpec, uniform_layouts


@dataclass(frozen=True)
class TorchArrays:
    """See `cache/arrays.py`."""

    device: torch.device | str = "cpu"

    def bytes(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def int64(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def host_floats(self, n_rows: int, n: int) -> Tensor:
        return torch.empty(n_rows, n)

    def inference(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()


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
    layouts = uniform_layouts(
        n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim, segments=segments
    )
    return KVCache(layouts, arrays=TorchArrays(device), **options)
