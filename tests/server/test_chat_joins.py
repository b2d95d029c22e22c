"""The chat with a server instead of a process of its own."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Static

from localkv.chat.engine import (
    ChatRequest,
    EngineOptions,
    EngineStoppedError,
    Finished,
    PromptProgress,
    TextDelta,
)
from localkv.chat.server_engine import ServerEngine
from localkv.chat.session import ChatSession
from localkv.chat.store import Store
from localkv.errors import ContextOverflowError, LocalKVError, UsageError
from localkv.sampling.params import SamplingParams
from localkv.tui.app import ChatApp
from localkv.tui.chat_screen import ChatScreen
from support.server import RunningServer

GREEDY = SamplingParams(temperature=0.0)
ASK = ChatRequest([{"role": "user", "content": "Tell me of a dog."}], GREEDY, max_tokens=16)


@pytest.fixture
def engine(server: RunningServer) -> ServerEngine:
    return ServerEngine(f"{server.url}/v1")


def said(engine: ServerEngine, request: ChatRequest) -> tuple[str, Finished]:
    *deltas, finished = engine.answer(request)
    assert isinstance(finished, Finished)
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)), finished


def test_it_answers_as_the_server_does(server: RunningServer, engine: ServerEngine):
    facts = engine.load(lambda progress: None)
    assert (facts.n_ctx, facts.type_k, facts.server) == (2048, "f16", engine.url)
    assert sum(facts.layers) > 1
    text, finished = said(engine, ASK)
    body = {"messages": [*ASK.messages], "max_tokens": 16, "temperature": 0}
    _, answer = server.post("/v1/chat/completions", body)
    assert text == answer["choices"][0]["message"]["content"]
    assert finished.completion_tokens == answer["usage"]["completion_tokens"]
    assert engine.count_tokens(ASK) == finished.prompt_tokens


def test_it_tells_how_far_a_long_prompt_is_read(engine: ServerEngine):
    engine.load(lambda progress: None)
    long = [{"role": "user", "content": "One day a dog ran to the park. " * 150}]
    news = [*engine.answer(ChatRequest(long, GREEDY, max_tokens=4))]
    read = [one for one in news if isinstance(one, PromptProgress)]
    assert len(read) > 2
    assert [one.n_read for one in read] == sorted(one.n_read for one in read)
    assert read[-1].n_read == read[-1].n_prompt == news[-1].prompt_tokens


def test_any_server_will_do(engine: ServerEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "_own_facts", lambda: None)
    facts = engine.load(lambda progress: None)
    assert facts.n_ctx == 2048
    assert facts.layers == ()
    engine._counts = False
    assert 5 < engine.count_tokens(ASK) < 30


def test_an_answer_that_is_begun_goes_on(engine: ServerEngine):
    engine.load(lambda progress: None)
    text, _ = said(engine, ASK)
    request = ChatRequest(ASK.messages, GREEDY, max_tokens=8, prefill="Once upon a")
    begun, _ = said(engine, request)
    assert begun.startswith("Once upon a")
    assert begun != text


def test_a_cancelled_answer_ends_soon(engine: ServerEngine):
    engine.load(lambda progress: None)
    answer = engine.answer(ChatRequest(ASK.messages, GREEDY, ignore_eos=True))
    next(answer)
    began = time.monotonic()
    engine.cancel()
    *_, finished = answer
    assert isinstance(finished, Finished)
    assert finished.finish_reason == "cancelled"
    assert time.monotonic() - began < 5


def test_what_goes_wrong_is_told(engine: ServerEngine):
    engine.load(lambda progress: None)
    with pytest.raises(ContextOverflowError, match="3003 tokens"):
        said(engine, ChatRequest([{"role": "user", "content": "dog " * 3000}]))
    with pytest.raises(LocalKVError):
        said(engine, ChatRequest([]))
    with pytest.raises(EngineStoppedError, match="does not answer"):
        ServerEngine("http://127.0.0.1:9").load(lambda progress: None)
    with pytest.raises(UsageError, match="no server's address"):
        ServerEngine("localhost:8080")


@pytest.mark.parametrize("tells", [True, False])
def test_the_screen_with_a_server(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: bool
):
    if not tells:
        monkeypatch.setattr(ServerEngine, "_own_facts", lambda self: None)

    async def talk() -> None:
        with closing(Store(tmp_path / "chats.sqlite3")) as store:
            session = ChatSession(store, model=server.url, params=GREEDY, max_tokens=8)
            app = ChatApp(
                ChatScreen(
                    session, EngineOptions(server.url), lambda options: ServerEngine(options.model)
                )
            )
            async with app.run_test(size=(120, 40)) as pilot:
                await until(lambda: app.screen.meter.facts is not None)
                app.screen.query_one("Prompt").text = "Tell me of a dog."
                await pilot.press("enter")
                await until(lambda: any(one.role == "assistant" for one in path(app)))
                await until(lambda: app.screen.answer is None)
                assert path(app)[-1].content
                shown = str(app.screen.query_one("#model", Static).content)
                assert server.url in shown

    def path(app: Any) -> Any:
        return app.screen.session.conversation.path()

    async def until(condition: Any) -> None:
        for _ in range(400):
            if condition():
                return
            await asyncio.sleep(0.05)
        raise AssertionError("it does not happen")

    asyncio.run(talk())
