"""`Arrays` of torch, on a device, and caches in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from localkv.cache.arrays import Recorder
from localkv.cache.kv_cache import KVCache, SegmentBatch
from localkv.cache.layout import PAGE_TOKENS, SegmentSpec, uniform_layouts
from localkv.kernels.recorded_step import GraphRecorder, TorchReadback, Unrecorded


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

    def to_numpy(self, array: Tensor) -> NDArray[Any]:
        return array.cpu().numpy()

    def write(self, array: Tensor, values: Sequence[int]) -> None:
        array[: len(values)].copy_(torch.tensor(values), non_blocking=True)

    def place_row(self, batch: SegmentBatch, position: Tensor) -> None:
        row = position - batch.first_position
        batch.length_table.copy_(row + 1)
        page = batch.page_table[0].gather(0, row // PAGE_TOKENS)
        batch.slots.copy_(page * PAGE_TOKENS + row % PAGE_TOKENS)

    def recorder(self) -> Recorder:
        device = torch.device(self.device)
        return GraphRecorder(device) if device.type == "cuda" else Unrecorded()

    def read_back(self, number: Tensor) -> TorchReadback:
        return TorchReadback(number)

    def inference(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    def n_threads(self) -> int:
        return torch.get_num_threads()

    def use_threads(self, n: int) -> None:
        if n != torch.get_num_threads():
            torch.set_num_threads(n)


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
