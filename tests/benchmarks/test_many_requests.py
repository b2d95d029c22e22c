"""`benchmarks/many_requests.py`, with small models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT


@pytest.mark.slow
def test_small_models(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    program = ROOT / "benchmarks" / "many_requests.py"
    done = subprocess.run(
        [sys.executable, program, "--small", "--json", figures], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    many = found["a thousand requests"]
    assert (many["requests that ended"], many["pages that did not come back"]) == (60, 0)
    assert found["a known beginning"]["ratio"] > 0
    assert f"| requests that ended | {many['requests that ended']:,} |" in done.stdout
