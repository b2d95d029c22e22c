"""`benchmarks/gpu.py` walks through all its stages without a GPU, and on a bare image."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS

PROGRAM = ROOT / "benchmarks" / "gpu.py"
MISSING = (
    "click", "gguf", "huggingface_hub", "hypothesis", "jinja2", "llvmlite", "markdown_it", "numba",
    "platformdirs", "rich", "sentencepiece", "textual", "tokenizers",
)  # fmt: skip
"""What images for GPUs don't have: all but torch, Triton, NumPy and pytest."""
BARE = f"""
import os, runpy, sys
sys.path.append({str(TESTS)!r})
from support.interpreted import replace_language_once
os.environ["TRITON_INTERPRET"] = "1"
replace_language_once()
del os.environ["TRITON_INTERPRET"]  # the program says so itself
sys.modules.update(dict.fromkeys({MISSING!r}))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


POINTS = """#!/bin/sh
echo '[{"n_prompt": 512, "n_gen": 0, "n_depth": 0, "model_type": "8B Q4_0", "avg_ts": 9000.5},
       {"n_prompt": 0, "n_gen": 128, "n_depth": 4096, "model_type": "8B Q4_0", "avg_ts": 150}]'
"""
"""What llama-bench prints, in part."""


def run(*options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE, PROGRAM, "--dry-run", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
@pytest.mark.long
def test_dry_run(tmp_path: Path) -> None:
    peer = tmp_path / "llama-bench"
    peer.write_text(POINTS)
    peer.chmod(0o755)
    done = run("--llama-bench", peer, "--gguf", "x", "--out", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (table,) = tmp_path.glob("dry-run-*.md")
    text = table.read_text()
    for stage in ("tests", "copy", "decode", "slope", "linear", "prefill", "model", "itl", "peer"):
        assert f"## {stage}" in text
    assert "| pp512 | 8B Q4_0 | q8_0 | 0 | 9000 |" in text
    rows = json.loads(table.with_suffix(".json").read_text())["rows"]
    assert not [row for row in rows if "left out" in row.get("result", "")]
    (tests,) = (row for row in rows if row["stage"] == "tests")
    assert tests["status"] == 0
    assert "skipped" in tests["result"] or "passed" in tests["result"]
    assert {row["test"] for row in rows if row["stage"] == "model"} == {"tg2", "pp16"}


def test_what_there_is_no_time_for() -> None:
    done = run("--minutes", 0, "--stages", "tests", "model")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "## tests\n\n| result |\n|---|\n| left out: 0 minutes are over |" in done.stdout
    assert "## model" in done.stdout
    assert "## copy" not in done.stdout
