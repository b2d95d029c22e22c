"""No body costs the event loop more than some milliseconds, in any dialect.

What is measured is the processor's time of each of the loop's callbacks, and not when something was
answered: other programs of the machine don't count.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from localkv.chat.engine import EngineOptions
from localkv.server.front import Front
from localkv.server.models import Models
from localkv.server.settings import ModelSettings, ServerSettings
from support.front import said, served
from support.server import SHIPPED_MODEL

MOST_MS = 10.0
"""Milliseconds of the loop's own CPU time in one callback."""

N = 7_500_000


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _chat(**fields: Any) -> bytes:
    return _json({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **fields})


MESSAGES = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

MANY = MESSAGES * 9_000
BLOCK = {"role": "user", "content": [{"type": "text", "text": "a"}]}
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
ANTHROPIC, OLLAMA = "/v1/messages", "/api/generate"


def _said(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def _called(arguments: str) -> list[dict[str, object]]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "content": "b", "tool_call_id": "a"}
    return [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


def _names(n: int) -> list[str]:
    return [f"v{i}" for i in range(n)]


GRAMMAR = "root ::= " + "|".join(f'"{name}"' for name in _names(40_000))

BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "open string": ("/tokenize", lambda: b'{"content":"' + b'\\"' * (N // 2)),
    "open lists": (NATIVE, lambda: b"[" * N),
    "lists": ("/tokenize", lambda: b'{"content":[' + b"[]," * (N // 3) + b"1]}"),
    "most lists": ("/tokenize", lambda: b'{"content":[' + b"[]," * 90_000 + b"1]}"),
    "strings": (OLLAMA, lambda: b'{"model":[' + b'"",' * (N // 3) + b"1]}"),
    "message": (CHAT, lambda: _chat(messages=_said("a " * (N // 2)))),
    "messages": (CHAT, lambda: _chat(messages=MESSAGES * 200_000)),
    "some messages": (CHAT, lambda: _chat(messages=MANY)),
    "blocks": (ANTHROPIC, lambda: _chat(model="m", messages=[BLOCK] * 9_000)),
    "items": ("/v1/responses", lambda: _json({"input": MANY})),
    "ollama": ("/api/chat", lambda: _chat(model="m", messages=MANY)),
    "count": (f"{ANTHROPIC}/count_tokens", lambda: _chat(messages=_said("a " * 500_000))),
    "prompt": (NATIVE, lambda: _json({"prompt": "a " * (N // 2)})),
    "wide prompt": (TEXT, lambda: _json({"prompt": "日本" * (N // 6)})),
    "prompts": (TEXT, lambda: _json({"prompt": ["a"] * 90_000})),
    "ids": (NATIVE, lambda: _json({"prompt": [1] * 900_000})),
    "tokens": ("/tokenize", lambda: _json({"content": "a " * 500_000, "with_pieces": True})),
    "detokenize": ("/detokenize", lambda: _json({"tokens": [300] * 500_000})),
    "odd numbers": (NATIVE, lambda: b'{"prompt":[' + b"1e-322," * (N // 7) + b"1]}"),
    "some odd numbers": (NATIVE, lambda: b'{"prompt":[' + b"1e-322," * 4_500 + b"1]}"),
    "biases": (NATIVE, lambda: _json({"prompt": "a", "logit_bias": [["aa", 1]] * 40_000})),
    "bias": (NATIVE, lambda: _json({"prompt": "a", "logit_bias": [["a b " * 250_000, 1]]})),
    "stop": (OLLAMA, lambda: _json({"model": "m", "options": {"stop": ["a" * 100_000] * 10}})),
    "variables": (
        CHAT,
        lambda: _chat(chat_template_kwargs=dict.fromkeys(map(str, range(N // 18)))),
    ),
    "tools": (CHAT, lambda: _chat(tools=[TOOL] * 9_000, tool_choice="required")),
    "arguments": (CHAT, lambda: _chat(messages=_called('{"a":[' + "[]," * (N // 3) + "1]}"))),
    "a schema": (NATIVE, lambda: _json({"prompt": "a", "json_schema": {"enum": _names(90_000)}})),
    "a long schema": (NATIVE, lambda: _json({"prompt": "a", "json_schema": {"const": "v" * N}})),
    "a grammar": (NATIVE, lambda: _json({"prompt": "a", "grammar": GRAMMAR})),
    "a wrong value": (NATIVE, lambda: _json({"prompt": "a", "n_predict": "a" * N})),
    "a wrong prompt": (NATIVE, lambda: _json({"prompt": [["a" * N]]})),
    "a wrong block": (ANTHROPIC, lambda: _chat(model="m", messages=_said([["a" * N]]))),
    "a model": (NATIVE, lambda: _json({"prompt": "a", "model": "a" * N})),
    "small lists": ("/tokenize", lambda: b'{"content":[' + b"[]," * 10_000 + b"1]}"),
    "small messages": (ANTHROPIC, lambda: _chat(model="m", messages=MESSAGES * 900)),
}


def models() -> Models:
    """The model that ships, as if it were loaded."""
    model = ModelSettings(EngineOptions(str(SHIPPED_MODEL)), "tales", loads_at_start=False)
    return Models(ServerSettings((model,)))


@pytest.mark.attack
async def test_no_body_costs_the_loop_much(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(engine=SimpleNamespace(n_ctx=1024), n_parallel=4, cache_tokens=1024)
    monkeypatch.setattr(Front, "facts", facts)
    monkeypatch.setattr(Models, "is_ready", lambda self, model: True)
    worst, here = 0.0, threading.get_ident()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        nonlocal worst
        started = time.thread_time()
        run(handle)
        if threading.get_ident() == here:
            worst = max(worst, 1e3 * (time.thread_time() - started))

    late = dict[str, float]()
    server = models()
    await server.load()
    await server.first.front.load()
    async with served(server) as port:
        monkeypatch.setattr(asyncio.Handle, "_run", timed)
        for name, (path, make) in BODIES.items():
            body = await asyncio.to_thread(make)
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += f"Content-Length: {len(body)}\r\n\r\n"
            await asyncio.sleep(0)
            worst = 0.0
            answer = await _answered(port, head.encode(), body)
            assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")), (name, answer[:300])
            late[name] = round(worst, 1)
    assert max(late.values()) < MOST_MS, late


async def _answered(port: int, head: bytes, body: bytes) -> bytes:
    """The answer to a request that a thread sends, so that the loop's time is the server's."""
    return await asyncio.to_thread(lambda: asyncio.run(said(port, head, body)))
