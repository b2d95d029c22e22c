"""Requests that take too long."""

from __future__ import annotations

import pytest

from support.server import RunningServer


@pytest.mark.slow
def test_a_request_ends_at_its_deadline_and_says_so():
    server = RunningServer("--timeout", "1", "-c", "200000", "-n", "-1").wait()
    try:
        chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
        status, answer = server.post("/v1/chat/completions", chat)
        assert status == 504
        assert "more than 1 s" in answer["error"]["message"]
        _, streamed = server.post("/v1/chat/completions", {**chat, "stream": True})
        assert '"content":' in streamed
        assert streamed.rstrip().splitlines()[-1].startswith('data: {"error":{"code":504')
        assert "[DONE]" not in streamed
    finally:
        assert server.stop() == 0
