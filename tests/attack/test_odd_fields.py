"""Every field of every endpoint with every odd value gets an answer, and leaves nothing open."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

from support.attack.odd_fields import odd_requests
from support.server import RunningServer


@pytest.mark.attack
def test_no_field_of_any_endpoint_harms_others() -> None:
    server = RunningServer("-a", "tales").wait()
    try:

        def harm(case: tuple[str, bytes]) -> str:
            path, body = case
            began = time.monotonic()
            status, answer = server.post(path, body)
            seconds = time.monotonic() - began
            is_json = isinstance(answer, dict | list) or b'"stream": ' in body
            if status in (200, 400, 404, 413, 422, 429, 501) and is_json and seconds < 10:
                return ""
            return f"{path} {body[:200]!r}: {status} in {seconds:.1f} s, {str(answer)[:200]}"

        requests = odd_requests(7)
        with ThreadPoolExecutor(3) as pool:
            while several := list(islice(requests, 2000)):
                harmful = [one for one in pool.map(harm, several) if one]
                assert not harmful, harmful[:10]
        assert "localkv_texts_open 0.0" in server.get("/metrics")[1]
        assert server.get("/health") == (200, {"status": "ok"})
    finally:
        server.stop()
