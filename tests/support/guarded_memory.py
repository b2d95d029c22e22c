"""Memory in which a kernel that leaves its bounds is found.

Each block lies between two pages that nobody may touch, at the end or at the start of its own. So
what is read or written beyond it there ends the process. On the other side, and between
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

from localkv.kernels.cpu.attention import kernels, latent_attention, plan, program
from localkv.kernels.cpu.attention import packed_attention as attention
from localkv.kernels.cpu.attention.jobs import Job
from localkv.kernels.cpu.layers import chains, latents, layer, recurrent
from localkv.kernels.cpu.layers import program as tokens
from localkv.kernels.cpu.linear import arena, late_panels
from localkv.kernels.cpu.linear import products as linear
from localkv.kernels.cpu.runtime import chain
from localkv.kernels.cpu.store import store_kv

PAGE = mmap.PAGESIZE
PATTERN, POISON = 0xA5, 0xFF
GAP = 192
"""Bytes of a pattern between parts of scratch memory."""
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

    def empty(self, shape: tuple[int, ...], what: str, dtype: Any = np.float32) -> np.ndarray:
        """Poisoned."""
        n_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self.bytes(n_bytes, what).view(dtype).reshape(shape)

    def check(self) -> None:
        """Nothing was written next to a block."""
        for block in self.blocks:
            block.check()


def _guarded_scratch(memory: GuardedMemory) -> Iterator[Any]:
    """What launchers use again and again is allocated each time, and no larger than they ask."""

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
        self.most_bytes = max(self.most_bytes, self.n_bytes)
        return place

    run_steps = chain.run_steps

    def run(self: chain.Chain, **values: Any) -> None:
        def poisoned_steps(steps: array[int], n_threads: int) -> None:
            data = self.scratch.data
            for place in vars(self).get("parts", ()):
                data[place.offset : place.offset + place.n_bytes] = POISON
            run_steps(steps, n_threads)
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
            if template == "attention/decode":
                part["partial"] = (
                    4 * facts.n_parts * facts.n_kv_heads * facts.n_rows * (facts.head_dim + 2)
                )
            for name, n_bytes in part.items():
                data = memory.bytes(n_bytes, f"{name} of {template}")
                items[Job._fields.index(name)] = data.ctypes.data
        kernels.run_worker(kernels.worker_of(template), int(items.ctypes.data), threads)

    for module in (attention, late_panels, store_kv):
        yield patch.object(module, "run", run)

    def table(self: plan.Table, items: np.ndarray) -> None:
        self.items = memory.array(np.ascontiguousarray(items), "a table")
        self.address = int(self.items.ctypes.data)

    yield patch.object(plan.Table, "__init__", table)


def _guarded_arrays(memory: GuardedMemory) -> Iterator[Any]:
    """Outputs that launchers allocate, and panels."""

    class GuardedNumpy:
        """NumPy as launchers see it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def empty(self, shape: Any, dtype: Any) -> np.ndarray:
            shape = (shape,) if isinstance(shape, int) else shape
            return memory.empty(shape, f"an output {list(shape)}", dtype)

        def empty_like(self, x: np.ndarray) -> np.ndarray:
            return self.empty(x.shape, x.dtype)

        def zeros(self, shape: Any, dtype: Any) -> np.ndarray:
            out = self.empty(shape, dtype)
            out[:] = 0
            return out

    def panels(self: arena.PanelArena, n_bytes: int) -> np.ndarray:
        return memory.bytes(n_bytes, "panels")

    def nothing(self: arena.PanelArena, taken: np.ndarray) -> None:
        pass

    for module in (
        attention,
        linear,
        chains,
        recurrent,
        layer,
        latents,
        latent_attention,
        tokens,
        program,
        store_kv,
    ):
        yield patch.object(module, "np", GuardedNumpy())
    yield patch.object(arena.PanelArena, "take", panels)
    yield patch.object(arena.PanelArena, "join_pages", nothing)


Part = Callable[[GuardedMemory], Iterator[Any]]
CPU: tuple[Part, ...] = (_guarded_scratch, _guarded_jobs, _guarded_arrays)


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
