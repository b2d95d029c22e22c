"""`benchmarks/busy_machine.py`: what else runs is there while it measures, and gone afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from localkv.system.processor import usable_cores
from support.paths import ROOT
from support.waiting import wait_for

FOLDER = ROOT / "benchmarks"
sys.path[:0] = [str(FOLDER)]

from busy_machine import running  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="stops processes")


def test_what_else_runs_ends_with_the_measurement(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = f"import sys, time; open({str(told)!r}, 'w').write(input()); time.sleep(60)"
    with running([[sys.executable, "-c", code]], "go on\n") as others:
        wait_for(lambda: told.exists() and told.read_text() == "go on")
        assert others[0].poll() is None
    assert others[0].poll() is not None


@pytest.mark.slow
def test_a_small_model(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    flags = ["--shape", "llama-tiny", "--rounds", "1", "--decode", "8", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, FOLDER / "busy_machine.py", *flags, "--json", figures],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    loads = ["alone", *(f"{n} busy" for n in sorted({1, usable_cores()})), "another localkv"]
    assert f"| | {' | '.join(loads)} |" in done.stdout
    speeds = json.loads(figures.read_text())["speeds"]
    assert list(speeds) == loads
    assert all(speed > 0 for row in speeds.values() for rounds in row.values() for speed in rounds)
