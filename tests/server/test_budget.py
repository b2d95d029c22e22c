"""A server whose cache has a budget that several requests share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.server import RunningServer

STORY = "Lily lost her red kite in the park. Tom, a kind fox, found it under the old tree. "
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One with five pages in the last types of the ladder, and one and a half in f16."""
    running = RunningServer("-np", "3", "--kv-budget", "1MiB").wait()
    yield running
    assert running.stop() == 0


def asked(code: int, n_stories: int) -> dict[str, Any]:
    """A question about the beginning of a conversation."""
    messages = [
        {"role": "user", "content": f"The code of the owl is {code}. Tell me a story."},
        {"role": "assistant", "content": STORY * n_stories},
        {"role": "user", "content": "What is the code of the owl?"},
    ]
    return {"messages": messages, "temperature": 0, "max_tokens": 10}


def test_requests_share_a_budget(server: RunningServer) -> None:
    codes = [735, 246, 618, 401]
    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(lambda code: server.post(CHAT, asked(code, 12)), codes))
    for code, (status, answer) in zip(codes, answers, strict=True):
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens"] > 280
        assert str(code) in answer["choices"][0]["message"]["content"]


def test_the_context_is_what_the_last_types_hold(server: RunningServer) -> None:
    assert server.get("/props")[1]["default_generation_settings"]["n_ctx"] == 1280
    types = "f16/f16, q8_0/q8_0, q8_0/q4_0, q4_1c/q4_0, q4_1c128/kv3_0"
    holds = f"the cache holds 1,280 tokens in 1020.00 KiB ({types})"
    assert holds in "".join(server.lines)
    status, answer = server.post(CHAT, asked(1, 80))
    assert status == 400
    assert "1280" in answer["error"]["message"]
