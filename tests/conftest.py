"""Fixtures that many tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
