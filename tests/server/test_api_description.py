"""The published description of the API, and requests that schemathesis makes from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode

from support.server import RunningServer

EXAMPLES = 10
MISSING = 501


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    """A server whose answers are short, whatever they are asked for."""
    running = RunningServer("-c", "64").wait()
    yield running
    assert running.stop() == 0


def test_each_body_is_described(server: RunningServer):
    status, api = server.get("/openapi.json")
    assert status == 200
    body = api["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    reference = body["content"]["application/json"]["schema"]["$ref"]
    fields = api["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    assert {"messages", "tools", "temperature"} <= set(fields)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_breaks_the_server(small: RunningServer, mode: GenerationMode):
    schema = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    seen = set[str]()
    for result in schema.get_all_operations():
        operation = result.ok()
        if not operation.body:
            continue

        @given(case=operation.as_strategy(mode))
        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        def try_one(case: schemathesis.Case) -> None:
            answer = case.call(timeout=60)
            assert answer.status_code < 500 or answer.status_code == MISSING, answer.text

        try_one()
        seen.add(operation.path)
    assert {"/v1/messages", "/v1/responses", "/completion"} <= seen
    assert small.get("/health")[0] == 200
