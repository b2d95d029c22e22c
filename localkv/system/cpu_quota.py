"""How much of the processors' time control groups leave this process: a container's `--cpus`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


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
    """Of one group: microseconds of every so many; "max" or -1 is no limit."""
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
