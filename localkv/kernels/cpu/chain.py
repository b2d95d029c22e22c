"""Chains of workers that run with one call: what a layer's operation is made of on the CPU.

A chain is put together once and run many times. Its jobs (arrays of int64, see `thread_pool`)
name what differs from run to run, such as the addresses of a batch's tensors, and what lies in
scratch memory, whose address may change when it grows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localkv.kernels.cpu.thread_pool import run_steps

LINE = 64
"""Bytes of a cache line."""


class Scratch:
    """Memory that chains use one after the other; it grows as needed."""

    def __init__(self) -> None:
        self.data = np.empty(0, np.uint8)
        self.address = 0

    def reserve(self, n_bytes: int) -> None:
        if len(self.data) < n_bytes + LINE:
            self.data = np.empty(n_bytes + LINE, np.uint8)
            self.address = (self.data.ctypes.data + LINE - 1) // LINE * LINE


@dataclass(frozen=True)
class Place:
    """An address in the scratch memory: bytes from its start."""

    offset: int


Item = int | str | Place
"""Of a job: a number, the name of one that is given to `Chain.run`, or a place."""


class Chain:
    """Workers and their jobs, in order.

    Args:
        scratch: whose memory the places are in.
    """

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self.n_bytes = 0
        self.items = array("q")
        self.steps = array("q")
        self.starts = list[int]()
        self.names = dict[str, list[int]]()
        self.places = list[int]()
        self.base = 0
        self.n_items = 0

    def take(self, n_bytes: int) -> Place:
        """Scratch memory that is the chain's own while it runs."""
        place = Place(self.n_bytes)
        self.n_bytes += -(-n_bytes // LINE) * LINE
        return place

    def add(self, worker: int, job: Sequence[Item], threads: int) -> None:
        """Run a worker, by its address, on some threads; a job's first item is its counter."""
        self.starts.append(len(self.items))
        for item in job:
            if isinstance(item, str):
                self.names.setdefault(item, []).append(len(self.items))
                self.items.append(0)
            elif isinstance(item, Place):
                self.places.append(len(self.items))
                self.items.append(item.offset)
            else:
                self.items.append(item)
        self.steps.extend((worker, 0, threads - 1))

    def run(self, **values: int) -> None:
        """Run all steps, with the numbers that the jobs name."""
        items, base = self.items, self.base
        self.scratch.reserve(self.n_bytes)
        if self.n_items != len(items):
            self.n_items = len(items)
            address = items.buffer_info()[0]
            for i, start in enumerate(self.starts):
                self.steps[3 * i + 1] = address + 8 * start
        if base != self.scratch.address:
            self.base = self.scratch.address
            for i in self.places:
                items[i] += self.base - base
        for name, value in values.items():
            for i in self.names[name]:
                items[i] = value
        run_steps(self.steps)
