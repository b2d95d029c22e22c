"""A polite client is served whatever others send.

The benchmark says how fast. Limits of time are generous here; the limits of memory, the statuses,
and what may be lost are the benchmark's own.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.paths import ROOT

PATIENT = ("--health-ms", "10000", "--steps", "200")


def run(*options: str, seconds: float) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/hostile_neighbours.py", *PATIENT, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.slow
def test_each_kind_of_harm_once() -> None:
    run("--seconds", "0", "--clients", "2", seconds=300)


@pytest.mark.attack
@pytest.mark.parametrize("n_clients", [1, 4, 16])
def test_all_kinds_of_harm_for_minutes(n_clients: int) -> None:
    run("--seconds", "60", "--clients", str(n_clients), seconds=3600)
