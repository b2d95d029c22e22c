"""Chains of workers that run with one call: what a layer's operation is made of on the CPU.

A chain is put together once and run many times. Its jobs (arrays of int64, see `thread_pool`)
name what differs from run to run, such as a batch's arrays, and what lies in scratch memory, whose
address may change when it grows. With each address a job says how many bytes its worker will touch
there, and no chain runs with less.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.arrays import address
from localkv.kernels.cpu.runtime.thread_pool import run_rounds, run_steps

LINE = 64
"""Bytes of a cache line."""


class Scratch:
    """Memory that chains use one after the other; it grows as needed."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Give the memory back; chains that have its address must go, too."""
        self.data = np.empty(0, np.uint8)
        self.address = 0

    def reserve(self, n_bytes: int) -> None:
        if len(self.data) < n_bytes + LINE:
            self.data = np.empty(n_bytes + LINE, np.uint8)
            self.address = (self.data.ctypes.data + LINE - 1) // LINE * LINE


@dataclass(frozen=True)
class Place:
    """A part of the scratch memory: bytes from its start, and how many."""

    offset: int
    n_bytes: int


NO_PLACE = Place(0, 0)

Where = NDArray[Any] | Place | str
"""An array, scratch memory, or the name of an array that is given to `Chain.run`."""


@dataclass(frozen=True)
class Memory:
    """What a worker is given an address of, and how many bytes it touches from there on."""

    where: Where
    n_bytes: int


Item = int | str | Memory
"""An item of a job: a number, the name of one that is given to `Chain.run`, or memory."""


def said(name: str, x: NDArray[Any], n_bytes: int) -> str:
    layout = "" if x.flags.c_contiguous else ", not contiguous"
    return f"{name} has {x.nbytes} bytes{layout}, workers touch {n_bytes}"


class Chain:
    """Workers and their jobs, in order.

    Args:
        scratch: whose memory the places are in.
    """

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self.n_bytes = self.most_bytes = 0
        self.of_a_step = NO_PLACE
        self.bound = dict[str, int | Where]()
        self.items = array("q")
        self.steps = array("q")
        self.starts = list[int]()
        self.names = dict[str, list[int]]()
        self.needs = dict[str, int]()
        self.places = list[int]()
        self.kept = list[NDArray[Any]]()
        self.base = 0
        self.n_items = 0
        self.n_threads = 1

    def take(self, n_bytes: int) -> Place:
        """Scratch memory that is the chain's own while it runs."""
        place = Place(self.n_bytes, n_bytes)
        self.n_bytes += -(-n_bytes // LINE) * LINE
        self.most_bytes = max(self.most_bytes, self.n_bytes)
        return place

    def take_for_a_step(self, n_bytes: int) -> Place:
        """Take memory that a step uses only while it runs, so that several may have it."""
        if self.of_a_step.n_bytes < n_bytes:
            self.of_a_step = self.take(n_bytes)
        return Place(self.of_a_step.offset, n_bytes)

    def take_again(self, n_bytes: int) -> None:
        """Let later steps have the memory that was taken since `n_bytes` were."""
        self.n_bytes = n_bytes
        if self.of_a_step.offset + self.of_a_step.n_bytes > n_bytes:
            self.of_a_step = NO_PLACE

    def bind(self, **places: int | Where) -> None:
        """What names mean in steps that are added from now on, which are then not given to `run`.

        So steps that are made for a chain of their own can be part of a longer one.
        """
        self.bound = places

    def add(self, worker: int, job: Sequence[Item], threads: int) -> None:
        """Run a worker, by its address, on some threads; a job's first item is its counter."""
        self.starts.append(len(self.items))
        for item in job:
            if isinstance(item, str):
                number = self.bound.get(item, item)
                if not isinstance(number, (int, str)):
                    raise BoundsError(f"{item} is memory, and no number")
                item = number
            if isinstance(item, Memory):
                self.items.append(self._address(item.where, item.n_bytes))
            elif isinstance(item, str):
                self.names.setdefault(item, []).append(len(self.items))
                self.items.append(0)
            else:
                self.items.append(item)
        self.steps.extend((worker, 0, threads - 1))
        self.n_threads = max(self.n_threads, threads)

    def add_kept(self, worker: int, job: NDArray[np.int64], threads: int) -> int:
        """Add a step whose job lies in an array, which may be filled for each run; its number."""
        self.kept.append(job)
        self.starts.append(-1)
        self.steps.extend((worker, address(job), threads - 1))
        self.n_threads = max(self.n_threads, threads)
        return len(self.starts) - 1

    def use_threads(self, step: int, threads: int) -> None:
        """Run a step on another number of threads from now on."""
        self.steps[3 * step + 2] = threads - 1
        self.n_threads = max(self.n_threads, threads)

    def _address(self, where: Where, n_bytes: int) -> int:
        """The next item, as far as it is known now."""
        if isinstance(where, str):
            meant = self.bound.get(where, where)
            if isinstance(meant, int):
                raise BoundsError(f"{where} is a number, and no memory")
            where = meant
        if isinstance(where, np.ndarray):
            if where.nbytes < n_bytes or not where.flags.c_contiguous:
                raise BoundsError(said("an array", where, n_bytes))
            self.kept.append(where)
            return address(where)
        if isinstance(where, Place):
            if n_bytes > where.n_bytes:
                raise BoundsError(f"{n_bytes} bytes of {where.n_bytes} in scratch memory")
            self.places.append(len(self.items))
            return where.offset
        self.needs[where] = max(n_bytes, self.needs.get(where, 0))
        self.names.setdefault(where, []).append(len(self.items))
        return 0

    def run(self, **values: int | NDArray[Any]) -> None:
        """Run all steps, with the numbers and arrays that the jobs name.

        Raises:
            BoundsError: something is missing, or an array has less than workers will touch.
        """
        self._fill(values)
        run_steps(self.steps, self.n_threads)

    def run_rounds(self, worker: int, job: int, is_over: int, **values: int | NDArray[Any]) -> None:
        """`run` again and again, each time with a worker after the steps, on one thread, until it
        has set an item.

        Args:
            worker, job, is_over: addresses.

        Raises:
            BoundsError: as `run`.
        """
        self._fill(values)
        run_rounds(self.steps + array("q", (worker, job, 0)), self.n_threads, is_over)

    def _fill(self, values: Mapping[str, int | NDArray[Any]]) -> None:
        """Write what the jobs name."""
        items, base = self.items, self.base
        self.scratch.reserve(self.most_bytes)
        if self.n_items != len(items):
            self.n_items = len(items)
            first = items.buffer_info()[0]
            for i, start in enumerate(self.starts):
                if start >= 0:
                    self.steps[3 * i + 1] = first + 8 * start
        if base != self.scratch.address:
            self.base = self.scratch.address
            for i in self.places:
                items[i] += self.base - base
        if len(values) != len(self.names):
            raise BoundsError(f"{', '.join(values)} are given, {', '.join(self.names)} needed")
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                if value.nbytes < self.needs[name] or not value.flags.c_contiguous:
                    raise BoundsError(said(name, value, self.needs[name]))
                value = address(value)
            for i in self.names[name]:
                items[i] = value
