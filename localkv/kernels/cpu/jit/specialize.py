"""Kernels that are compiled once per parameter value and stay compiled across processes.

At the first start, processes help this one. Numba compiles under a lock, so a second core is of use
to a second process only. While a block `with compiling_ahead(sources)` runs, helpers compile
sources from the end of the list. This process goes on with its work and compiles, or waits for,
what it comes to need (`specialized`). A helper sends machine code through a pipe. If it fails, this
process compiles by itself. Whoever waits is told how many of the kernels there are.

What generated tokens need is among it, though the first token could do without: a text that stands
still for two seconds after its first word looks broken.
"""

from __future__ import annotations

import functools
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from localkv.kernels.cpu.jit.kernel_source import KernelSource, is_stored, store, stored
from localkv.kernels.cpu.jit.machine_code import Functions, link, unpack
from localkv.system.processor import usable_cores
from localkv.system.python_child import child_command, child_environment

logger = logging.getLogger(__name__)

FEWEST = 6
"""With fewer kernels to compile, a helper would start after this process has made them."""
MOST_HELPERS = 3
HELPER = "localkv.kernels.cpu.jit.compile_helper"

_changes = threading.Lock()
_LONGEST_CHANGE = 1.0
"""Seconds after which whoever changes `_current` was interrupted, and never gives the lock back."""
_current: _Helpers | None = None

OnKernel = Callable[[int, int], None]
"""(kernels that are compiled, all that had to be), on the thread that asks for them."""


class _Helpers:
    """Processes that compile, a thread for each that talks with it, and what is left to do.

    Args:
        sources: what is to be compiled; helpers take it from the end.
    """

    def __init__(
        self, sources: Sequence[KernelSource], n_helpers: int, on_kernel: OnKernel
    ) -> None:
        self.lock = threading.Lock()
        self.missing = frozenset(sources)
        self.made = set[KernelSource]()
        self.n_told = -1
        self.on_kernel = on_kernel
        self.pending = [*sources]
        self.taken = dict[KernelSource, Future[Functions | None]]()
        self.processes = _started(n_helpers)
        self.threads = [
            threading.Thread(target=self._serve, args=(process,), daemon=True)
            for process in self.processes
        ]
        for thread in self.threads:
            thread.start()

    def _take_last(self) -> tuple[KernelSource, Future[Functions | None]] | None:
        """The next source; None if there is none."""
        with self.lock:
            if not self.pending:
                return None
            source = self.pending.pop()
            future = self.taken[source] = Future[Functions | None]()
            return source, future

    def _serve(self, process: subprocess.Popen[bytes]) -> None:
        """Give a helper one source after the other, then end it."""
        while (taken := self._take_last()) is not None:
            source, future = taken
            functions = None
            try:
                functions = _ask(process, source)
                if functions is not None:
                    store(source, functions)
            finally:
                future.set_result(functions)
            if functions is None:
                logger.info("a helper that compiles kernels has ended")
                break
            self.count(source)
        process.kill()
        with process:  # closes its pipes and waits
            pass

    def result(self, source: KernelSource) -> Functions | None:
        """What a helper has made of a source; None if the caller has to compile it."""
        with self.lock:
            if source in self.pending:
                self.pending.remove(source)
            future = self.taken.get(source)
        if future is None:
            return None
        while not future.done() and (other := self._take_last()) is not None:
            _compile_here(*other)
            self.count(other[0])
            self.tell()
        return future.result()

    def count(self, source: KernelSource) -> None:
        """It is compiled now."""
        with self.lock:
            self.made.add(source)

    def tell(self) -> None:
        """Report how many are compiled, of those that had to be, if it has changed."""
        n_made = len(self.made & self.missing)
        if n_made != self.n_told:
            self.n_told = n_made
            self.on_kernel(n_made, len(self.missing))

    def finish(self) -> None:
        """Have all compiled, also what nobody has come to need."""
        while (taken := self._take_last()) is not None:
            _compile_here(*taken)
            self.count(taken[0])
            self.tell()
        for source, future in list(self.taken.items()):
            if future.result() is None:
                _compile_here(source, Future())
                self.count(source)
            self.tell()

    def close(self) -> None:
        """End the helpers, whatever they are at, and make room for others."""
        global _current
        with self.lock:
            self.pending.clear()
        for process in self.processes:
            process.kill()
        for thread in self.threads:
            thread.join()
        if _changes.acquire(timeout=_LONGEST_CHANGE):
            _current = None
            _changes.release()


def _compile_here(source: KernelSource, future: Future[Functions | None]) -> None:
    functions = None
    try:
        functions = source.compile()
        store(source, functions)
    finally:
        future.set_result(functions)


def _started(n_helpers: int) -> list[subprocess.Popen[bytes]]:
    """That number of helpers, or as many as the system can start."""
    processes = list[subprocess.Popen[bytes]]()
    try:
        for _ in range(n_helpers):
            process = subprocess.Popen(
                child_command(HELPER),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
            )
            processes.append(process)
    except OSError as error:
        logger.info("a helper that compiles kernels cannot be started: %s", error)
    return processes


def _ask(process: subprocess.Popen[bytes], source: KernelSource) -> Functions | None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        request = json.dumps([source.template, dict(source.parameters)])
        process.stdin.write(request.encode() + b"\n")
        process.stdin.flush()
        size = process.stdout.read(8)
        if len(size) < 8:
            return None
        return unpack(source.name, process.stdout.read(int.from_bytes(size, "little")))
    except OSError:
        return None


def compiled(source: KernelSource) -> Functions:
    """What a helper has compiled, which is waited for, or else this process; it is stored, too."""
    helpers = _current
    functions = None if helpers is None else helpers.result(source)
    if functions is None:
        functions = source.compile()
        store(source, functions)
        if helpers is not None:
            helpers.count(source)
    return functions


def tell() -> None:
    """Let whoever waits know what is compiled by now."""
    helpers = _current
    if helpers is not None:
        helpers.tell()


@contextmanager
def compiling_ahead(
    sources: Sequence[KernelSource],
    *,
    n_cores: int | None = None,
    on_kernel: OnKernel = lambda done, total: None,
) -> Iterator[bool]:
    """Have other cores compile the `sources` that no process has compiled before, while the block
    runs; after it all of them are compiled. The block is told whether they were before.

    Args:
        sources: what the block will need, in this order, and what will be needed after it.
        n_cores: all that may be used, this process's included; None counts them.
        on_kernel: called as kernels are compiled, and not if none is missing.
    """
    missing = [source for source in dict.fromkeys(sources) if not is_stored(source)]
    helpers = _new_helpers(missing, n_cores, on_kernel)
    if helpers is None:
        yield not missing
        return
    try:
        helpers.tell()
        yield False
        helpers.finish()
    finally:
        helpers.close()


def _new_helpers(
    sources: Sequence[KernelSource], n_cores: int | None, on_kernel: OnKernel
) -> _Helpers | None:
    """None if nothing is to be done, or others are at it."""
    global _current
    n_helpers = min(MOST_HELPERS, (n_cores or usable_cores()) - 1)
    if len(sources) < FEWEST or not sys.executable:
        n_helpers = 0
    if not _changes.acquire(timeout=_LONGEST_CHANGE):
        return None
    try:
        if _current is not None or not sources:
            return None
        _current = _Helpers(sources, n_helpers, on_kernel)
        return _current
    finally:
        _changes.release()


def _addresses(functions: Functions) -> dict[str, int] | None:
    addresses = {name: link(function) for name, function in functions.items()}
    return addresses if all(addresses.values()) else None


_one_at_a_time = threading.RLock()
"""Models that are loaded at the same time need the same kernels."""


@functools.cache
def specialized(source: KernelSource) -> Mapping[str, int]:
    """The addresses of a kernel's callbacks by name; compiles them if no process has before."""
    with _one_at_a_time:
        addresses = _linked(source)
        tell()
        return addresses


def _linked(source: KernelSource) -> Mapping[str, int]:
    found = stored(source)
    if found is not None and (addresses := _addresses(found)) is not None:
        return addresses
    addresses = _addresses(compiled(source))
    if addresses is None:
        raise RuntimeError(f"{source.template} was compiled but does not link")
    return addresses
