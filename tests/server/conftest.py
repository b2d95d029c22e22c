"""One server for the tests that change nothing on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from localkv.server.request_record import RequestRecord, current
from support.encoder_models import write_encoder
from support.server import RunningServer


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """With the model that ships, loaded."""
    running = RunningServer("-a", "tales").wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client of it."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `bert.gguf`, an encoder, and `bert-rank.gguf`, a reranker."""
    folder = tmp_path_factory.mktemp("encoders")
    for name in ("bert", "bert-rank"):
        write_encoder(name, folder / f"{name}.gguf")
    return folder


@pytest.fixture(scope="module")
def encoder(files: Path) -> Iterator[RunningServer]:
    running = RunningServer("-a", "bert", model=files / "bert.gguf").wait()
    yield running
    assert running.stop() == 0


@pytest.fixture
def record() -> Iterator[RequestRecord]:
    """The request that is answered, which notes warnings."""
    record = RequestRecord("a", "POST", "/")
    token = current.set(record)
    yield record
    current.reset(token)
