"""Memory in which a kernel that leaves its bounds is found.

Each block lies between two pages that nobody may touch, at the end or at the start of those it may,
so that what is read or written beyond it there ends the process. On the other side, and between
parts of scratch memory, are bytes of a pattern that must not change. Memory that a kernel has to
write first holds NaN, whatever type it is read as.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from localkv.kernels.cpu.attention import kernels
from localkv.kernels.cpu.attention import packed_attention as attention
from localkv.kernels.cpu.attention import tables as attention_tables
from localkv.kernels.cpu.attention.job import Job
from localkv.kernels.cpu.linear import panel_arena
from localkv.kernels.cpu.linear import products as linear
from localkv.kernels.cpu.runtime import chain
from localkv.kernels.cpu.store import rotate, store_kv

PAGE = mmap.PAGESIZE
PATTERN, POISON = 0xA5, 0xFF
GAP = 192
"""Bytes of a pattern between parts of scratch memory."""
NUMPY = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.uint8: np.uint8,
}
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Block:
    """Bytes `first` to `end` - 1 of `around` are a kernel's; the others hold a pattern."""

    what: str
    around: np.ndarray
    first: int
    end: int

    def check(self) -> None:
        for side in (self.around[: self.first], self.around[self.end :]):
            assert (side == PATTERN).all(), f"bytes next to {self.what} were written"


class GuardedMemory:
    """Blocks of one case."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.blocks = list[Block]()
        self.n_guarded = 0

    def bytes(self, n_bytes: int, what: str, fill: int = POISON) -> np.ndarray:
        """uint8 [n_bytes]."""
        n_pages = max(1, -(-n_bytes // PAGE))
        memory = mmap.mmap(-1, (n_pages + 2) * PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for page in (0, n_pages + 1):
            assert _libc.mprotect(ctypes.c_void_p(address + page * PAGE), PAGE, 0) == 0
        around = np.frombuffer(memory, np.uint8, n_pages * PAGE, PAGE)
        around[:] = PATTERN
        first = len(around) - n_bytes if self.rng.random() < 0.7 else 0
        self.blocks.append(Block(what, around, first, first + n_bytes))
        self.n_guarded += 1
        out = around[first : first + n_bytes]
        out[:] = fill
        return out

    def array(self, values: np.ndarray, what: str) -> np.ndarray:
        """A copy."""
        out = self.bytes(values.nbytes, what).view(values.dtype).reshape(values.shape)
        out[...] = values
        return out

    def tensor(self, values: Tensor, what: str) -> Tensor:
        """A copy, contiguous."""
        return torch.from_numpy(self.array(values.contiguous().numpy(), what))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
        """Poisoned."""
        kind = np.dtype(NUMPY[dtype])
        n_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        return torch.from_numpy(self.bytes(n_bytes, what).view(kind).reshape(shape))

    def check(self) -> None:
        """Nothing was written next to a block."""
        for block in self.blocks:
            block.check()


def _guarded_scratch(memory: GuardedMemory) -> Iterator[Any]:
    """What launchers use again and again is taken anew each time, and no larger than they ask."""

    def take_floats(self: attention.ScratchMemory, n_floats: int) -> int:
        self.floats = memory.bytes(4 * n_floats, "scratch of attention").view(np.float32)
        return int(self.floats.ctypes.data)

    def reserve(self: chain.Scratch, n_bytes: int) -> None:
        self.data = memory.bytes(n_bytes, "scratch of a chain", PATTERN)
        self.address = int(self.data.ctypes.data)

    def take(self: chain.Chain, n_bytes: int) -> chain.Place:
        place = chain.Place(self.n_bytes, n_bytes)
        vars(self).setdefault("parts", []).append(place)
        self.n_bytes += -(-n_bytes // 64) * 64 + GAP
        return place

    run_steps = chain.run_steps

    def run(self: chain.Chain, **values: int | Tensor) -> None:
        def poisoned_steps(steps: array[int]) -> None:
            data = self.scratch.data
            for place in vars(self).get("parts", ()):
                data[place.offset : place.offset + place.n_bytes] = POISON
            run_steps(steps)
            ours = np.zeros(len(data), bool)
            for place in vars(self).get("parts", ()):
                ours[place.offset : place.offset + place.n_bytes] = True
            assert (data[~ours] == PATTERN).all(), "bytes between parts of scratch were written"

        with patch.object(chain, "run_steps", poisoned_steps):
            original_run(self, **values)

    original_run = chain.Chain.run
    yield patch.object(attention.ScratchMemory, "take", take_floats)
    yield patch.object(chain.Scratch, "reserve", reserve)
    yield patch.object(chain.Chain, "take", take)
    yield patch.object(chain.Chain, "run", run)


def _guarded_jobs(memory: GuardedMemory) -> Iterator[Any]:
    """Jobs are copied, and each part of attention's memory gets a block of its own."""

    def run(template: str, job: Any, threads: int) -> None:
        items = memory.array(np.array(job, np.int64), f"the job of {template}")
        if template.startswith("attention"):
            facts = Job(*items.tolist())
            part = {"scratch": 4 * threads * facts.scratch_floats}
            if template == "attention/rows":
                part["partial"] = (
                    4 * facts.n_parts * facts.n_kv_heads * facts.n_rows * (facts.head_dim + 2)
                )
            for name, n_bytes in part.items():
                data = memory.bytes(n_bytes, f"{name} of {template}")
                items[Job._fields.index(name)] = data.ctypes.data
        kernels.run_worker(kernels._worker(template), int(items.ctypes.data), threads)

    for module in (attention, linear, rotate, store_kv):
        yield patch.object(module, "run", run)

    def table(self: attention_tables.Table, items: np.ndarray) -> None:
        self.items = memory.array(np.ascontiguousarray(items), "a table")
        self.address = int(self.items.ctypes.data)

    yield patch.object(attention_tables.Table, "__init__", table)


def _guarded_tensors(memory: GuardedMemory) -> Iterator[Any]:
    """Outputs that launchers allocate, and panels."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty

    def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return memory.empty(tuple(shape), dtype, f"an output {list(shape)}")

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

    def panels(self: panel_arena.PanelArena, n_bytes: int) -> np.ndarray:
        return memory.bytes(n_bytes, "panels")

    def nothing(self: panel_arena.PanelArena) -> None:
        pass

    yield patch.object(torch, "empty", our_empty)
    yield patch.object(torch, "empty_like", our_empty_like)
    yield patch.object(Tensor, "new_empty", our_new_empty)
    yield patch.object(panel_arena.PanelArena, "take", panels)
    yield patch.object(panel_arena.PanelArena, "join_pages", nothing)


Part = Callable[[GuardedMemory], Iterator[Any]]
TENSORS: tuple[Part, ...] = (_guarded_tensors,)
CPU: tuple[Part, ...] = (_guarded_scratch, _guarded_jobs, _guarded_tensors)


@contextmanager
def guarded(rng: random.Random, parts: tuple[Part, ...] = CPU) -> Iterator[GuardedMemory]:
    """Kernels work on guarded memory; at the end nothing beside it was written."""
    memory = GuardedMemory(rng)
    patches = [change for part in parts for change in part(memory)]
    for change in patches:
        change.start()
    try:
        yield memory
    finally:
        for change in reversed(patches):
            change.stop()
    memory.check()
