"""Runs a function of a test module in a process of its own, with a limit on its memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT, TESTS

SOURCES = (ROOT, TESTS, TESTS / "attack")


def run_limited(module: str, call: str, *, seconds: float) -> str:
    """What `call` of `module` prints; fails with what it says on stderr.

    The call sets its limit itself (`limit_growth`), after what it needs is imported.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import {module} as t; t.{call}"],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
        },
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


def limit_growth(n_bytes: int) -> None:
    """Let this process's address space grow by that many bytes and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + n_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def peak_bytes() -> int:
    """The most memory that this process has had since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def forget_peak() -> int:
    """Reset the peak; return how much memory is in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()
