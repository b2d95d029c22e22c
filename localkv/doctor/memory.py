"""Memory: how much the machine has, and how much of it a model can still take."""

from __future__ import annotations

import os
from pathlib import Path

from localkv.doctor.finding import Finding
from localkv.errors import byte_size
from localkv.system.machine_memory import machine_memory

LITTLE_BYTES = 1 << 30


def check_memory(root: Path = Path("/")) -> Finding:
    """Of the machine, or of the control group where that leaves less.

    Args:
        root: where /proc and /sys are.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = machine_memory(root)
    if budget is None:
        return Finding("memory", "info", f"{byte_size(total)} in all", None, {"total": total})
    facts = {"total": total, "usable": budget.n_bytes, "source": budget.source}
    summary = f"{byte_size(total)}, {byte_size(budget.n_bytes)} {budget.source}"
    if budget.n_bytes < LITTLE_BYTES:
        hint = "close programs, raise the container's limit, or take a smaller model and context"
        return Finding("memory", "warning", summary, hint, facts)
    return Finding("memory", "ok", summary, None, facts)
