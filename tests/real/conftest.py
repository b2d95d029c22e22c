"""Two published models; each test here is skipped where they are not (`make real` fetches them)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from localkv import LLM
from support.paths import DATA
from support.real_models import FILES

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.real)


@pytest.fixture(scope="session")
def folder() -> Path:
    """The folder of the models (LOCALKV_REAL_MODELS)."""
    name = os.environ.get("LOCALKV_REAL_MODELS", "")
    if not name:
        pytest.skip("LOCALKV_REAL_MODELS names no folder of real models; see `make real`")
    folder = Path(name)
    missing = [file for file in FILES.values() if not (folder / file).is_file()]
    if missing:
        pytest.skip(f"LOCALKV_REAL_MODELS, {folder}, lacks {', '.join(missing)}; see `make real`")
    return folder


@pytest.fixture(scope="session")
def smollm2(folder: Path) -> LLM:
    return LLM(folder / FILES["smollm2"], n_ctx=2048, progress=False)


@pytest.fixture(scope="session")
def gemma3(folder: Path) -> LLM:
    return LLM(folder / FILES["gemma3"], n_ctx=2048, progress=False)


@pytest.fixture(params=list(FILES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def llm(name: str, request: pytest.FixtureRequest) -> LLM:
    """Each of both, one after the other."""
    return request.getfixturevalue(name)


@pytest.fixture
def by_llama_cpp(name: str) -> dict[str, Any]:
    """What llama.cpp makes of the model (tests/data/make_llama_cpp_real.py)."""
    return json.loads((DATA / "llama_cpp_real.json").read_text())["models"][FILES[name]]


@pytest.fixture(scope="session")
def handbook() -> str:
    """English prose of an administrator's handbook."""
    return (DATA / "handbook.txt").read_text()
