"""The processor: its name, and which and how many of its cores this process may use.

Linux and users write sets of processors as "0-3,8", "ff" or "4-7". Control groups may leave a
process less than all of their time (a container's `--cpus`). ARM's cores are known by number only.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from localkv.errors import UsageError

CPUINFO = Path("/proc/cpuinfo")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
"""The CPUs, as the system counts them, that share a core with one."""
PERFORMANCE = Path("/sys/devices/cpu_core/cpus")
"""The file that lists the fast CPUs of an Intel processor that has slow ones, too."""


def processor_name() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    found = [*names, arm_cores(lines), platform.processor(), platform.machine()]
    return " ".join(next(name for name in found if name).split())


def usable_cores() -> int:
    """CPUs that the system lets this process run on, by its affinity and its container's share."""
    try:
        n = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        n = os.cpu_count() or 1
    return _within_quota(n)


def physical_cores(cpus: Collection[int] = ()) -> int:
    """Cores that this process may run on, those with several hardware threads once each.

    Where there are fast and slow cores, the fast ones count, if it may use any: who shares work
    with a slow one waits for it. Where the system does not say which threads share a core, each
    counts as one.

    Args:
        cpus: only those, if any.
    """
    try:
        usable = frozenset(cpus or os.sched_getaffinity(0))
        fast = usable & _performance_cpus() or usable
        cores = {Path(SIBLINGS.format(cpu)).read_text(encoding="ascii") for cpu in fast}
        return _within_quota(len(cores))
    except (AttributeError, OSError):
        return min(usable_cores(), len(cpus)) if cpus else usable_cores()


def _performance_cpus() -> frozenset[int]:
    try:
        return cpus_of_list(PERFORMANCE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()


def _within_quota(n: int) -> int:
    quota = cpu_quota()
    return n if quota is None else max(1, min(n, math.ceil(quota)))


_MASK = re.compile(r"(?:0[xX])?[0-9a-fA-F]{1,256}", re.ASCII)
_RANGE = re.compile(r"(\d{0,5})-(\d{0,5})", re.ASCII)


def cpus_of_list(text: str) -> frozenset[int]:
    """The CPUs in a list as Linux writes it: "0-3,8\\n"; raises ValueError for any other text."""
    found = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def list_of_cpus(cpus: Iterable[int]) -> str:
    """The list of CPUs as Linux writes it: "0-3,8"."""
    numbers = sorted(cpus)
    starts = [b for a, b in pairwise([-2, *numbers]) if b != a + 1]
    ends = [a for a, b in pairwise([*numbers, -2]) if b != a + 1]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def cpus_of_mask(text: str) -> frozenset[int]:
    """The CPUs in a hexadecimal mask. Its lowest bit is CPU 0, as for `taskset` and llama.cpp.

    Raises:
        UsageError: `text` is no hexadecimal mask.
    """
    if not _MASK.fullmatch(text):
        raise UsageError(f"{text!r} is no hexadecimal mask of CPUs", hint="f is the first four")
    mask = int(text, 16)
    return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)


def cpus_of_range(text: str, most: int) -> frozenset[int]:
    """The CPUs in "LOW-HIGH". Without LOW they start at 0, and without HIGH they end at `most`.

    Raises:
        UsageError: `text` is no range, or an empty one.
    """
    match = _RANGE.fullmatch(text)
    if match is None or text == "-":
        raise UsageError(f"{text!r} is no range of CPUs", hint="0-3 is the first four")
    first, last = int(match[1] or 0), int(match[2] or most)
    if last < first:
        raise UsageError(f"{text!r} is an empty range of CPUs")
    return frozenset(range(first, last + 1))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time, by control groups of version 1 or 2; None without a limit."""
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> Iterator[float]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers == "" or "cpu" in names:
            mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            # a container sees its own group at the root, not at `path`
            inner = mount / path.strip("/")
            for folder in (inner, *inner.parents):
                if folder.is_relative_to(mount):
                    yield from _quota(folder)


def _quota(group: Path) -> Iterator[float]:
    """Yield the processors that one group may use: its quota of microseconds divided by its period.

    A quota of "max" or -1 is no limit.
    """
    try:
        if (both := group / "cpu.max").exists():
            quota, period = both.read_text(encoding="ascii").split()
        else:
            quota, period = (
                (group / f"cpu.cfs_{name}_us").read_text(encoding="ascii").strip()
                for name in ("quota", "period")
            )
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return


_MAKERS = {"0x41": "ARM", "0x4e": "NVIDIA", "0x51": "Qualcomm", "0x61": "Apple", "0xc0": "Ampere"}
"""By the field "CPU implementer" of /proc/cpuinfo."""

_CORES = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
    ("0x41", "0xd81"): "Cortex-A720",
    ("0x41", "0xd83"): "Neoverse V3AE",
    ("0x41", "0xd84"): "Neoverse V3",
    ("0x41", "0xd85"): "Cortex-X925",
    ("0x41", "0xd87"): "Cortex-A725",
    ("0x41", "0xd8e"): "Neoverse N3",
    ("0x51", "0x001"): "Oryon",
    ("0xc0", "0xac3"): "AmpereOne",
}
"""By implementer and "CPU part", as Linux lists them (arch/arm64/include/asm/cputype.h)."""


def arm_cores(cpuinfo: list[str]) -> str:
    """The kinds of cores that lines of /proc/cpuinfo tell of, each once; "" without any."""
    kinds, maker = list[str](), ""
    for line in cpuinfo:
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "CPU implementer":
            maker = value
        elif name == "CPU part" and maker:
            known = _CORES.get((maker, value), f"core {value}")
            kinds.append(f"{_MAKERS.get(maker, maker)} {known}")
    return " and ".join(dict.fromkeys(kinds))
