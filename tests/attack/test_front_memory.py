"""The server's processes stay within a stated number of bytes, whatever is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.rude_client import children
from support.server import RunningServer

MOST_FRONT, MOST_ENGINE = 640, 256
"""Most MiB by which the two processes grow; docs/server-operation.md states the first."""

EMOJI = "\U0001f600"
MESSAGES = [{"role": "user", "content": "a"}]


def _said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


def _alternatives(n: int) -> str:
    return "root ::= " + "|".join(f'"{i}"' for i in range(n))


CHAT, NATIVE = "/v1/chat/completions", "/completion"
BODIES: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    (CHAT, lambda: {"messages": MESSAGES * 200_000}),
    (CHAT, lambda: {"messages": MESSAGES * 9_000}),
    (CHAT, lambda: _said("a " * 3_900_000)),
    (CHAT, lambda: _said(EMOJI + "a " * 3_900_000)),
    (CHAT, lambda: {**_said("a"), "chat_template_kwargs": dict.fromkeys(map(str, range(450_000)))}),
    (NATIVE, lambda: {"prompt": EMOJI + "a " * 3_900_000}),
    (NATIVE, lambda: {"prompt": [1] * 1_000_000}),
    ("/tokenize", lambda: {"content": "a" * 2_000_000}),
    ("/detokenize", lambda: {"tokens": [300] * 1_000_000}),
    (NATIVE, lambda: {"prompt": "a", "grammar": _alternatives(650_000)}),
    (NATIVE, lambda: {"prompt": "a", "grammar": _alternatives(40_000)}),
]


def _peak(pid: int) -> int:
    """MiB that a process has taken at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


@pytest.mark.attack
def test_whatever_is_sent_memory_is_bounded() -> None:
    server = RunningServer("-c", "1024").wait()
    try:
        front, engine = server.process.pid, max(children(server), key=_peak)
        before = _peak(front), _peak(engine)
        with ThreadPoolExecutor(6) as pool:
            for path, make in BODIES:
                body = json.dumps(make(), ensure_ascii=False).encode()
                for status, answer in pool.map(server.post, [path] * 6, [body] * 6):
                    assert status in (200, 400, 429, 503), (path, status, str(answer)[:200])
        assert _peak(front) - before[0] < MOST_FRONT
        assert _peak(engine) - before[1] < MOST_ENGINE
        assert server.get("/health")[0] == 200
    finally:
        assert server.stop() == 0
