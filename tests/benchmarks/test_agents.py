"""`benchmarks/agents.py`: a conversation by a library that is there, and what is made of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

PROGRAM = ROOT / "benchmarks" / "agents.py"
sys.path[:0] = [str(PROGRAM.parent)]

from agents import AGENTS, Row, count, rated, table  # noqa: E402


def test_a_wrong_answer_is_no_turn():
    row = Row("Codex", "1.2")
    rated(row, ["It is 4711.", "I can't read files."])
    assert row.turns == 1
    assert "I can't read files." in row.problem
    assert table([row]).splitlines()[-1].startswith("Codex: said")


def test_prompts_beside_the_conversation_are_not_counted():
    row = Row("opencode", "1.2")
    log = [
        {"method": "GET", "status": 503},
        {"method": "POST", "status": 200, "prompt_tokens": 500, "cached_tokens": 0},
        {"method": "POST", "status": 200, "prompt_tokens": 9000, "cached_tokens": 0},
        {"method": "POST", "status": 200, "prompt_tokens": 9100, "cached_tokens": 9000},
    ]
    count(row, log, ["A title", "<tool_call>\n{}", "The number is 4711."])
    assert (row.calls, row.first, row.later, row.read) == (1, 9000, 9100, 100)
    assert not row.problem


def test_a_program_that_is_not_there_is_left_out(tmp_path: Path):
    words = ["--npm", str(tmp_path), "--only", *list(AGENTS)[:3]]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("is not there") == 3


@pytest.mark.slow
def test_a_library_holds_its_conversation(tmp_path: Path):
    words = ["--only", "OpenAI SDK", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run([sys.executable, str(PROGRAM), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["turns"], row["calls"], row["problem"]) == (2, 2, "")
    assert 0 < row["read"] < row["first"]
