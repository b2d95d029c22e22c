"""`benchmarks/loading.py`: its table, and a run with a small model."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.paths import ROOT

FOLDER = ROOT / "benchmarks"
sys.path[:0] = [str(FOLDER)]

from loading import row, table  # noqa: E402


def test_cells_are_medians() -> None:
    ours = [(0.2, 0.3, 1.0, 0.5), (0.1, 0.4, 2.0, 0.6), (0.3, 0.2, 3.0, 0.4)]
    alone = row("llama:q4_0", {"localkv": ours})
    assert alone == ["llama:q4_0", "0.200", "0.300", "2.000", "0.500"]
    cells = row("llama:q4_0", {"localkv": ours, "llama.cpp": [(0.1, 0.6, 4.0, 0.2)] * 3})
    assert cells[1:3] == ["0.200 / 0.100 = 2.00", "0.300 / 0.600 = 0.50"]
    assert cells[3:] == ["2.000 / 4.000 = 0.50", "0.500 / 0.200 = 2.50"]
    assert table([cells]).splitlines()[2].startswith("| llama:q4_0 | 0.200 / 0.100")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="stops processes")
def test_a_small_model() -> None:
    command = [sys.executable, str(FOLDER / "loading.py"), "--models", "llama-tiny:q4_0"]
    command += ["--rounds", "1", "--settle", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"\| llama-tiny:q4_0 \| 0\.\d+ \| 0\.\d+ \| \d+\.\d+ \| \d+\.\d+ \|", done.stdout
    )
