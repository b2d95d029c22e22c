"""Fixtures that many tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from program import Program

# the tests themselves run in parallel; set before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def conformance() -> Path:
    """The folder of models and logits that llama.cpp and gguf-py made (LOCALKV_CONFORMANCE)."""
    default = Path(__file__).parents[2] / "shared" / "conformance"
    folder = Path(os.environ.get("LOCALKV_CONFORMANCE", default))
    if not folder.is_dir():
        pytest.skip(f"no conformance data at {folder}; set LOCALKV_CONFORMANCE")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete model file of 650 KiB: random weights, a tokenizer and a chat template."""
    from tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    """The command line in this process, away from the user's variables and configuration."""
    from program import Program

    return Program(monkeypatch, tmp_path)
