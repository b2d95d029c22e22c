"""The machine's memory: how much there is for a model, and keeping some of it in RAM.

It is this machine's, its container's share, or a GPU's. Nothing is imported that is heavy, and
torch least of all, so that `localkv plan` answers at once. An unknown value is None, never a guess.

`lock` keeps memory from being swapped out, and a file's pages from being dropped, by mlock of
POSIX. A lock lasts until it is taken back or the memory is unmapped.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localkv.errors import byte_size
from localkv.system.limits import address_space

_UNLIMITED = 1 << 60
"""From here on a control group's limit means that there is none."""
RUNTIME_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
"""Memory of a process without its model: Python, NumPy, LLVM and compiled kernels (110 MiB were
measured), and on a GPU torch, CUDA's context and code (estimated)."""


@dataclass(frozen=True)
class Budget:
    """Memory that a model may take.

    Attributes:
        n_bytes: how much.
        source: whose it is, as in "of this machine".
    """

    n_bytes: int
    source: str


def machine_memory(root: Path = Path("/")) -> Budget | None:
    """Memory that this process can still allocate without swapping; None if the system doesn't say.

    Files that are cached but could be dropped count as free, on the machine as in a control group.

    Args:
        root: where /proc and /sys are.
    """
    available = _meminfo(root).get("MemAvailable")
    if available is None:
        return None
    budgets = [Budget(available, "available on this machine"), *_group_memory(root)]
    if (space := address_space()) is not None:
        budgets.append(Budget(space[1], "left of the memory that this process may map (ulimit -v)"))
    return min(budgets, key=lambda budget: budget.n_bytes)


def process_bytes(pid: int, root: Path = Path("/")) -> int:
    """Memory that the end of a process frees, without files that are mapped; 0 if unknown.

    Args:
        pid: its id.
        root: where /proc is.
    """
    try:
        lines = (root / f"proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def without_runtime(budget: Budget, device: str) -> Budget:
    """The part that is left once a process has started to run a model there."""
    runtime = RUNTIME_BYTES[device]
    source = f"{budget.source} less {runtime >> 20} MiB for the program itself"
    return Budget(max(0, budget.n_bytes - runtime), source)


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes; empty without that file (it is Linux's)."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3}


def _group_memory(root: Path) -> Iterator[Budget]:
    """Memory that this process' control groups leave, for versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            v1 = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _limits(v1, path, *names)


def _limits(mount: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[Budget]:
    """Yield the memory that a group leaves, and the memory that each group above it leaves.

    A container sees its own group at the root, not at `path`.
    """
    inner = mount / path.strip("/")
    for folder in (inner, *inner.parents):
        if not folder.is_relative_to(mount):
            return
        try:
            most = (folder / limit).read_text().strip()
            used = int((folder / usage).read_text())
            pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            stat = {name: int(value) for name, value in pairs}
        except OSError:
            continue
        if most == "max" or int(most) >= _UNLIMITED:
            continue
        files = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
        yield Budget(max(0, int(most) - used + files), "left of this container's memory")


def gpu_memory() -> Budget | None:
    """Free memory of the first GPU that CUDA may use, by NVIDIA's library.

    None if nvidia-ml-py or the driver is missing, or there is no GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()
    if not first or first == "-1":
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        if first.isdigit():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(first))
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(first)
        name = nvml.nvmlDeviceGetName(handle)
        free = int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    return Budget(free, f"free on {name}")


Range = tuple[int, int]
"""Address and bytes."""


@dataclass(frozen=True)
class Lock:
    """The outcome of `lock`.

    Attributes:
        ranges: whole pages that are locked.
        n_bytes: bytes of them.
        problem: the reason why the rest is not, or None.
    """

    ranges: tuple[Range, ...]
    problem: str | None = None

    @property
    def n_bytes(self) -> int:
        return sum(n for _, n in self.ranges)


def lock(ranges: Iterable[Range]) -> Lock:
    """Lock the pages of ranges until one can't be locked. Locking reads the pages of a file."""
    libc = _libc()
    if libc is None:
        return Lock((), "this system has no mlock")
    done: list[Range] = []
    for address, n_bytes in whole_pages(ranges):
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes)):
            return Lock(tuple(done), _lock_problem(ctypes.get_errno()))
        done.append((address, n_bytes))
    return Lock(tuple(done))


def unlock(ranges: Sequence[Range]) -> None:
    """Take locks back; the memory must not have been unmapped."""
    libc = _libc()
    for address, n_bytes in ranges if libc is not None else ():
        libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes))


def whole_pages(ranges: Iterable[Range]) -> list[Range]:
    """Ranges as whole pages, each page once, in order."""
    found: list[Range] = []
    for address, n_bytes in sorted(ranges):
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(address + n_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and start <= found[-1][0] + found[-1][1]:
            start, last = found[-1][0], sum(found.pop())
            end = max(end, last)
        if end > start:
            found.append((start, end - start))
    return found


def _libc() -> Any:
    return None if sys.platform == "win32" else ctypes.CDLL(None, use_errno=True)


def _lock_problem(number: int) -> str:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and number in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        return f"the limit is {byte_size(limit)} (ulimit -l); ulimit -l unlimited raises it"
    return os.strerror(number)
