"""`benchmarks/start.py`: what it runs, and what it makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

PROGRAM = ROOT / "benchmarks" / "start.py"
sys.path[:0] = [str(PROGRAM.parent)]

from start import GAP, PARTS, Run, llama_cli_parts, longest_gap, table  # noqa: E402


def test_medians_and_ranges() -> None:
    runs = {
        "a": [Run(dict.fromkeys(PARTS, 0.1 * i), 0.3 * i, i << 20) for i in (1, 2, 3)],
        "two": [Run({"load": 0.5}, 1.0, 5 << 20)],
    }
    assert table(runs).splitlines() == [
        "|  | start | load | first token | longest gap | whole process | peak, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| a |" + 3 * " 0.20 (0.10-0.30) |" + "  | 0.60 (0.30-0.90) | 2 (1-3) |",
        "| two |  | 0.50 (0.50-0.50) |  |  | 1.00 (1.00-1.00) | 5 (5-5) |",
    ]


def test_what_llama_cpp_s_program_says() -> None:
    said = "common_perf_print:        load time =      55.25 ms\n"
    assert llama_cli_parts("text", said) == {"load": 0.05525}
    assert llama_cli_parts("text", "nothing") == {}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts from the process's start")
def test_the_model_s_first_token(tiny_model: Path, tmp_path: Path) -> None:
    """With kernels and without; the parts are less than the whole."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(PROGRAM), "--model", str(tiny_model), "-p", "The fox"]
    command += ["--rounds", "1", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = json.loads(figures.read_text())
    warm, first, without = runs
    assert (warm, first) == ("localkv", "localkv, first start")
    assert without == "localkv, first start without kernels"
    for [run] in runs.values():
        assert list(run["parts"]) == [*PARTS, GAP]
        assert 0 < sum(run["parts"][part] for part in PARTS) < run["whole"] + 0.05
        assert run["parts"][GAP] >= 0
        assert run["peak"] > 20 << 20
    assert runs[warm][0]["whole"] < runs[without][0]["whole"]
    assert f"| {without} |" in done.stdout


def test_the_longest_gap() -> None:
    program = (
        "import time; [print(i, flush=True) or time.sleep(s) for i, s in enumerate((0, .3, 0))]"
    )
    assert 0.25 < longest_gap([sys.executable, "-c", program], {}) < 3
    assert longest_gap([sys.executable, "-c", "print(1)"], {}) == 0
