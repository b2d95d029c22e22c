"""`Arrays` of torch, on a device, and the formats' NumPy references called with torch tensors.

A GPU repeats steps as one CUDA graph.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localkv.cache.arrays import Arrays, Readback, Recorder, Segment, SegmentBatch, Step
from localkv.cache.layout import PAGE_TOKENS
from localkv.cache.repack import repack_page
from localkv.kernels.namespace import Arrived, Unrecorded
from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.quant_formats.shared.codebooks import codec_of
from localkv.system.threads import use_threads_now

WARM_UP_STEPS = 2
"""Steps before one is recorded: the first may compile kernels and allocate."""


class GraphRecorder:
    """A `Recorder` of CUDA graphs, which share memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: tuple[int, int] | None = None

    def record(self, step: Step, state: Sequence[Tensor]) -> Step:
        """See `Recorder`."""
        kept = [buffer.clone() for buffer in state]

        def restore() -> None:
            for buffer, value in zip(state, kept, strict=True):
                buffer.copy_(value)

        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                step()
                restore()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):  # type: ignore[arg-type]
            result: Tensor = step()
        self._memory = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class TorchReadback:
    """A token on its way to the host."""

    def __init__(self, token: Tensor) -> None:
        self._host = torch.empty(1, dtype=torch.int64, pin_memory=True)
        self._host.copy_(token, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def value(self) -> int:
        """Wait for it."""
        self._event.synchronize()
        return int(self._host[0])


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


@dataclass(frozen=True)
class TorchArrays:
    """See `cache/arrays.py`."""

    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    """The type of activations."""
    repack: Callable[[Segment, Segment, int], None] | None = None
    """A kernel for `repack_page`."""

    def bytes(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def strided(self, array: Tensor, first: int, shape: tuple[int, ...], page: int) -> Tensor:
        strides = (page, *(math.prod(shape[i:]) for i in range(2, len(shape) + 1)))
        return array.as_strided(shape, strides, array.storage_offset() + first)

    def zeros(self, n_rows: int, n: int) -> Tensor:
        return torch.zeros(n_rows, n, device=self.device)

    def floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def int64(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def host_floats(self, n_rows: int, n: int) -> Tensor:
        return torch.empty(n_rows, n)

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        with warnings.catch_warnings():
            # it may be a view of a file's mapping, which nobody writes to
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(array).to(self.device)

    def to_numpy(self, array: Tensor) -> NDArray[Any]:
        return array.cpu().numpy()

    def arrived(self, array: Any, source: Arrays) -> Tensor:
        if isinstance(array, Tensor):  # between GPUs a copy from one's memory to the other's
            return array.to(self.device, non_blocking=True)
        return self.from_numpy(array)

    def rows_of_pages(
        self, fmt: QuantFormat, side: str, plane: int, pages: Tensor
    ) -> NDArray[np.uint8]:
        return self.to_numpy(pages)

    def pages_of_rows(
        self, fmt: QuantFormat, side: str, plane: int, rows: NDArray[np.uint8]
    ) -> Tensor:
        return self.from_numpy(rows)

    def repack_page(self, source: Segment, target: Segment, page: int) -> None:
        if self.repack is not None:
            with nullcontext() if self._index is None else torch.cuda.device(self._index):
                self.repack(source, target, page)
        else:
            repack_page(self, source, target, page)

    def memory_piece(self, n_columns: int) -> int:
        return n_columns

    def floating(self, array: Tensor) -> Tensor:
        return array.to(self.dtype)

    def write(self, array: Tensor, values: Sequence[int]) -> None:
        array[: len(values)].copy_(torch.tensor(values), non_blocking=True)

    def place_row(self, batch: SegmentBatch, position: Tensor) -> None:
        first = batch.first_position if batch.first_table is None else batch.first_table
        row = position - first
        batch.length_table.copy_(row + 1)
        batch.slots.copy_(_slots(batch, row))

    def place_group(self, batch: SegmentBatch, tail: SegmentBatch, position: Tensor) -> None:
        assert batch.tail is not None
        assert batch.groups is not None
        size = batch.tail.group
        n_rows = position - batch.first_position + 1
        batch.length_table.copy_(n_rows // size * size)
        first = position - size + 1
        for i, rows in enumerate((batch, tail)):
            row = first.clamp(min=batch.first_position) - rows.first_position
            batch.groups[:, i] = torch.where(n_rows % size == 0, _slots(rows, row), -1)

    def recorder(self) -> Recorder:
        device = torch.device(self.device)
        if device.type != "cuda":
            return Unrecorded()
        from localkv.kernels.reference.torch_arrays import GraphRecorder

        return GraphRecorder(device)

    def read_back(self, number: Tensor) -> Readback:
        if number.device.type != "cuda":
            return Arrived(number.clone())
        from localkv.kernels.reference.torch_arrays import TorchReadback

        return TorchReadback(number)

    def inference(self) -> AbstractContextManager[Any]:
        if self._index is None:
            return torch.inference_mode()
        return self._inference_there()

    @property
    def _index(self) -> int | None:
        """The number of the GPU, if one is named: Triton launches on torch's current one."""
        device = torch.device(self.device)
        return device.index if device.type == "cuda" else None

    @contextmanager
    def _inference_there(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.device(self._index):
            yield

    def use_threads(self, n: int) -> None:
        use_threads_now(n)
        if n != torch.get_num_threads():
            torch.set_num_threads(n)


def _slots(batch: SegmentBatch, row: Tensor) -> Tensor:
    """Where the row of each sequence is: int64 [n_sequences]."""
    pages: Tensor = batch.page_table.gather(1, (row // PAGE_TOKENS)[:, None])[:, 0]
    return pages * PAGE_TOKENS + row % PAGE_TOKENS
