"""The processor: its name, and how many of its cores this process may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
"""The CPUs, as the system counts them, that share a core with one."""


def processor_name() -> str:
    """As the system calls it."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return " ".join((names or [platform.processor() or platform.machine()])[0].split())


def usable_cores() -> int:
    """Cores that the system lets this process run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def physical_cores() -> int:
    """Cores that this process may run on, those with several hardware threads once each.

    Where the system does not say which threads share a core, each counts as one.
    """
    try:
        cpus = os.sched_getaffinity(0)
        return len({Path(SIBLINGS.format(cpu)).read_text(encoding="ascii") for cpu in cpus})
    except (AttributeError, OSError):
        return usable_cores()
