"""`benchmarks/gpu.py` walks through all its stages without a GPU, and on a bare image."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT

PROGRAM = ROOT / "benchmarks" / "gpu.py"
MISSING = (
    "click", "gguf", "huggingface_hub", "hypothesis", "jinja2", "markdown_it", "msgspec",
    "platformdirs", "rich", "sentencepiece", "textual", "tokenizers",
)  # fmt: skip
"""What images for GPUs may lack: all but torch, Triton, NumPy, Numba and pytest."""
BARE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({MISSING!r}))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

POINTS = """#!/bin/sh
echo '[{"n_prompt": 512, "n_gen": 0, "n_depth": 0, "model_type": "8B Q4_0", "avg_ts": 9000.5},
       {"n_prompt": 0, "n_gen": 128, "n_depth": 4096, "model_type": "8B Q4_0", "avg_ts": 150}]'
"""
"""What llama-bench prints, in part."""


def run(*options: object, before: str = "") -> subprocess.CompletedProcess[str]:
    """A dry run.

    Args:
        before: lines that the process runs first.
    """
    return subprocess.run(
        [sys.executable, "-c", before + BARE, PROGRAM, "--dry-run", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=500,
    )


def rows_in(folder: Path) -> list[dict[str, Any]]:
    (document,) = folder.glob("dry-run-*.json")
    return list(json.loads(document.read_text())["rows"])


@pytest.mark.slow
@pytest.mark.long
def test_dry_run(tmp_path: Path) -> None:
    """All stages, in order, and no measurement that fails or is left out."""
    peer = tmp_path / "llama-bench"
    peer.write_text(POINTS)
    peer.chmod(0o755)
    options = ("--llama-bench", peer, "--gguf", "x", "--out", tmp_path)
    done = run(*options, "--minutes", 30)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = rows_in(tmp_path)
    assert [*dict.fromkeys(row["stage"] for row in rows)] == [
        *("kernels", "text", "copy", "compile", "decode", "slope", "linear", "prompts", "model"),
        *("itl", "places", "tests", "peer"),
    ]
    assert not [row for row in rows if row.get("failed") or "share" in row.get("result", "")]
    (table,) = tmp_path.glob("dry-run-*.md")
    assert "| q8_0 | pp512 | 8B Q4_0 | 0 | 9000 |" in table.read_text()
    stages = {name: [row for row in rows if row["stage"] == name] for name in ("text", "places")}
    assert all(row["kl_mean"] < 1e-2 for row in stages["text"])
    assert max(row["off"] for row in stages["places"] if row["test"] == "logits") < 0.03
    (tests,) = (row for row in rows if row["stage"] == "tests")
    assert tests["status"] == 0
    assert "skipped" in tests["result"] or "passed" in tests["result"]
    assert {row["test"] for row in rows if row["stage"] == "model"} == {"tg2", "pp16"}


BROKEN = """
import sys
import torch
SCALE = {"error": lambda: 1 / 0, "death": lambda: __import__("os")._exit(9)}
rand = torch.randn
def broken(*shape, **options):
    if shape[:1] == (3,):
        SCALE[sys.argv[-1]]()
    return rand(*shape, **options)
torch.randn = broken
"""
"""Every product of three tokens goes wrong."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [("error", "ZeroDivisionError: division by zero"), ("death", "its process ended with 9")],
)
def test_a_measurement_that_fails(how: str, said: str, tmp_path: Path) -> None:
    """It is a row that says so, the others of its stage and the next stage go on, and the exit code
    is not zero."""
    bare = BROKEN.replace("sys.argv[-1]", repr(how))
    done = run("--stages", "linear", "copy", "--out", tmp_path, before=bare)
    assert done.returncode == 1
    rows = rows_in(tmp_path)
    products = [(row["tokens"], row.get("result")) for row in rows if row["stage"] == "linear"]
    assert products == [(1, None), (3, said)] * 3
    assert rows[-1]["gb_per_s"] > 0


SLOW = """
import time
import torch
empty = torch.empty_like
torch.empty_like = lambda *a, **b: time.sleep(60) or empty(*a, **b)
"""
"""A copy that does not end."""


def test_a_stage_that_does_not_end(tmp_path: Path) -> None:
    options = ("--minutes", 0.01, "--stages", "copy", "peer", "--out", tmp_path)
    done = run(*options, before=SLOW)
    assert done.returncode == 0, done.stderr[-2000:]
    results = [(row["stage"], row["result"]) for row in rows_in(tmp_path)]
    assert results == [
        ("copy", "stopped: its share of 0.01 minutes is over"),
        ("peer", "left out: its share of 0.01 minutes is over"),
    ]


def test_what_there_is_no_time_for() -> None:
    done = run("--minutes", 0, "--stages", "tests", "model")
    assert done.returncode == 0, done.stderr[-2000:]
    left_out = "| result |\n|---|\n| left out: its share of 0 minutes is over |"
    assert f"## tests\n\n{left_out}" in done.stdout
    assert f"## model\n\n{left_out}" in done.stdout
    assert "## copy" not in done.stdout
