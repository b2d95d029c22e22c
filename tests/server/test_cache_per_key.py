"""What clients with other keys can learn by the time that an answer takes."""

from __future__ import annotations

import pytest

from support.server import RunningServer

CHAT = {
    "messages": [{"role": "user", "content": "Tell me a long story of a very big dog."}],
    "max_tokens": 4,
    "temperature": 0,
}


@pytest.mark.slow
def test_keys_share_no_rows():
    server = RunningServer("--api-key", "one,two", "--cache-per-key")
    try:
        while server.get("/health")[0] != 200:
            pass

        def cached(key: str) -> tuple[int, str]:
            status, answer = server.post(
                "/v1/chat/completions", CHAT, authorization=f"Bearer {key}"
            )
            assert status == 200
            details = answer["usage"]["prompt_tokens_details"]
            return details["cached_tokens"], answer["choices"][0]["message"]["content"]

        n_none, text = cached("one")
        assert n_none == 0
        assert cached("one") == (answer_of := cached("one"))
        assert answer_of[0] > 10
        assert cached("two") == (0, text)
        assert cached("two") == answer_of
        assert server.get("/v1/models")[0] == 401
    finally:
        assert server.stop() == 0
