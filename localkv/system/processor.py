"""The processor: its name, and how many of its cores this process may use."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Collection
from pathlib import Path

from localkv.system.arm_cores import arm_cores
from localkv.system.cpu_list import cpus_of_list
from localkv.system.cpu_quota import cpu_quota

CPUINFO = Path("/proc/cpuinfo")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
"""The CPUs, as the system counts them, that share a core with one."""
PERFORMANCE = Path("/sys/devices/cpu_core/cpus")
"""Those that are fast, where Intel's processor has slow ones, too."""


def processor_name() -> str:
    """As the system calls it."""
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
