"""What sessions have evaluated, kept from one time to the next (`--keep-state`)."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from localkv.chat.engine import ChatRequest, EngineOptions, Finished
from localkv.chat.store import KeptStates, Store
from localkv.engine_process.client import EngineProcess
from localkv.errors import UsageError
from localkv.sampling.params import SamplingParams
from support.chat_pilot import user, words
from support.fake_engine import FakeEngine
from support.paths import MODELS


def kept(tmp_path: Path) -> KeptStates:
    return KeptStates(tmp_path / "chats.sqlite3")


def test_a_session_is_kept_when_another_is_opened_and_at_the_end(tmp_path: Path):
    async def talk() -> None:
        states, engine = kept(tmp_path), FakeEngine(words("One."), words("Two."))
        async with user(engine, states=states) as me:
            await me.ask("first")
            first = me.chat.session.id
            await me.press("ctrl+n")
            await me.until(lambda: engine.saved)
            assert engine.saved == [str(states.path(first))]
            await me.ask("second")
            second = me.chat.session.id
            assert engine.loaded == []
            await me.chat.open_session(first)
            await me.until(lambda: engine.loaded)
            assert engine.loaded == [str(states.path(first))]
            assert engine.saved[1:] == [str(states.path(second))]
            await me.until(lambda: "kept from before" in me.rendered("#meter"))
        # nothing was evaluated since
        assert len(engine.saved) == 2

    asyncio.run(talk())


@pytest.mark.slow
def test_the_next_chat_goes_on_and_the_end_waits_for_the_file(tmp_path: Path):
    async def talk() -> None:
        states = kept(tmp_path)
        with closing(Store(tmp_path / "chats.sqlite3")) as store:
            before = FakeEngine(words("One."))
            async with user(before, states=states, store=store) as me:
                await me.ask("first")
                session = me.chat.session.id
            for _ in range(200):
                if before.closed:
                    break
                await asyncio.sleep(0.01)
            assert before.saved == [str(states.path(session))]
            after = FakeEngine(words("Two."))
            async with user(after, states=states, store=store, session_id=session) as me:
                await me.until(lambda: after.loaded)
                await me.ask("second")

    asyncio.run(talk())


def test_a_state_that_is_refused_is_told_and_the_chat_goes_on(tmp_path: Path):
    async def talk() -> None:
        states, engine = kept(tmp_path), FakeEngine(words("One."), words("Two."))
        engine.refuses_state = UsageError("it is of another model")
        async with user(engine, states=states) as me:
            await me.ask("first")
            first = me.chat.session.id
            await me.press("ctrl+n")
            await me.until(lambda: engine.saved)
            await me.chat.open_session(first)
            await me.until(lambda: me.app._notifications)
            assert any("another model" in one.message for one in me.app._notifications)
            await me.ask("second")

    asyncio.run(talk())


def test_a_deleted_session_leaves_no_state(tmp_path: Path):
    states = kept(tmp_path)
    states.prepared(3).write_text("rows")
    assert states.found(3) is not None
    states.forget(3)
    states.forget(3)
    assert states.found(3) is None


def test_a_real_engine_goes_on_from_the_file(tmp_path: Path):
    options = EngineOptions(str(MODELS / "tales-4M-Q8_0.gguf"), {"n_threads": 1})
    messages = [{"role": "user", "content": "Tell me of a dog. " * 20}]
    request = ChatRequest(messages, SamplingParams(temperature=0.0), max_tokens=8)
    ends, path = [], str(tmp_path / "state.safetensors")
    for is_first in (True, False):
        with closing(EngineProcess(options)) as engine:
            engine.load(lambda progress: None)
            if not is_first:
                assert engine.load_state(path) > 100
            *deltas, end = engine.answer(request)
            assert isinstance(end, Finished)
            ends.append(("".join(delta.text for delta in deltas), end.cached_tokens))
            if is_first:
                assert engine.save_state(path) > 100
    assert ends[0][0] == ends[1][0]
    assert ends[0][1] == 0
    assert ends[1][1] > 100
