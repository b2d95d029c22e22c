"""`benchmarks/gpu.py` walks through all its stages without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_dry_run() -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "--dry-run"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for stage in ("tests", "copy", "decode", "slope", "linear", "prefill", "model", "itl"):
        assert f"## {stage}" in done.stdout
    assert "left out" not in done.stdout
