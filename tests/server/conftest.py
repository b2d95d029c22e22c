"""One server for the tests that change nothing on it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from localkv.server.request_record import RequestRecord, current
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


@pytest.fixture
def record() -> Iterator[RequestRecord]:
    """The request that is answered, which notes warnings."""
    record = RequestRecord("a", "POST", "/")
    token = current.set(record)
    yield record
    current.reset(token)
