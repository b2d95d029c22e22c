"""The program that times embeddings, with a small model and without another program."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import embeddings


def test_a_table_and_all_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "N_EMBD": 64,
        "N_HEADS": 4,
        "N_FF": 96,
        "N_LAYERS": 2,
        "N_POSITIONS": 64,
    }.items():
        monkeypatch.setattr(embeddings, name, value)
    target = tmp_path / "figures.json"
    options = ["--texts", "2", "--tokens", "16", "--rounds", "1", "--types", "q8_0"]
    monkeypatch.setattr(sys, "argv", ["embeddings.py", *options, "--json", str(target)])
    embeddings.main()
    assert "| q8_0 |" in capsys.readouterr().out
    found = json.loads(target.read_text())
    assert found["tokens"] == 32
    assert [len(rounds) for rounds in found["seconds"]["q8_0"].values()] == [1]
