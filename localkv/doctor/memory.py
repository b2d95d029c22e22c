"""Memory: what the machine has, what is free, and the limit of a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localkv.doctor.finding import Finding
from localkv.errors import byte_size

LITTLE_BYTES = 1 << 30
_UNLIMITED = 1 << 60  # version 1 of control groups has no word for it, only huge numbers


@dataclass(frozen=True)
class Places:
    """Where the kernel tells; other folders in tests."""

    meminfo: Path = Path("/proc/meminfo")
    cgroup_of_self: Path = Path("/proc/self/cgroup")
    cgroups: Path = Path("/sys/fs/cgroup")


def check_memory(places: Places | None = None) -> Finding:
    places = places or Places()
    total, available = _machine_memory(places.meminfo)
    limit = cgroup_limit(places)
    facts = {"total": total, "available": available, "cgroup_limit": limit}
    summary = f"{byte_size(total)}"
    if available is not None:
        summary += f", {byte_size(available)} available"
    if limit is not None and limit < total:
        summary += f", at most {byte_size(limit)} for this control group"
    usable = min(bound for bound in (total, available, limit) if bound is not None)
    if usable < LITTLE_BYTES:
        hint = "close programs, raise the container's limit, or take a smaller model and context"
        return Finding("memory", "warning", summary, hint, facts)
    return Finding("memory", "ok", summary, None, facts)


def _machine_memory(meminfo: Path) -> tuple[int, int | None]:
    """Bytes in total, and those that can be had without swapping, if the system tells."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        total, available = (
            1024 * int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable")
        )
        return total, available
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None


def cgroup_limit(places: Places) -> int | None:
    """The lowest limit of the control groups that this process is in, in bytes."""
    limits = []
    for path in _limit_files(places):
        try:
            text = path.read_text().strip()
        except OSError:  # not there, or not ours to read
            continue
        if text.isdigit() and int(text) < _UNLIMITED:
            limits.append(int(text))
    return min(limits, default=None)


def _limit_files(places: Places) -> Iterator[Path]:
    """The files with a limit: that of the process's group and of all groups above it."""
    try:
        lines = places.cgroup_of_self.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, group = line.split(":", 2)
        if number == "0" and not controllers:
            root, name = places.cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = places.cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = root / group.lstrip("/")
        # in a container the path may be the host's, but the root is then the container's group
        while folder != root:
            yield folder / name
            folder = folder.parent
        yield root / name
