"""The age of a process, which counts Python's own start."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from localkv.system import this_process

PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from localkv.system.this_process import process_age; "
)


def test_it_grows_with_time() -> None:
    before = this_process.process_age()
    time.sleep(0.05)
    assert 0.04 < this_process.process_age() - before < 5


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_it_counts_from_the_start_of_the_process() -> None:
    """What runs before the first line, here a second program's sleep, is part of it."""
    program = PROGRAM.format(path=sys.path) + "print(process_age())"
    shell = f'sleep 0.3; exec {sys.executable} -c "$0"'
    done = subprocess.run(["sh", "-c", shell, program], capture_output=True, text=True, check=True)
    assert 0.3 < float(done.stdout) < 10


def test_where_the_system_does_not_say_it_counts_from_the_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    monkeypatch.setattr(this_process, "_IMPORTED", time.perf_counter() - 7)
    assert 7 <= this_process.process_age() < 8
