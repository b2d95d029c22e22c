"""Fixtures of the tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fake_llm import FakeLLM


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """What stands in for `LLM`, and remembers what it was asked."""

    class Script(FakeLLM):
        pass

    monkeypatch.setattr("localkv.llm.LLM", Script)
    return Script


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that is there, and no model."""
    path = tmp_path / "model.gguf"
    path.touch()
    return path
