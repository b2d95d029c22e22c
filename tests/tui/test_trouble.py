"""Prompts that do not fit, and models and engines that fail: what the chat says and offers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from textual.widgets import Static

from localkv.chat.engine import EngineStoppedError
from localkv.chat.store import Store
from localkv.errors import LocalKVError, ModelFileError
from localkv.tui.dialogs import ChoiceScreen
from localkv.tui.widgets.engine_view import LoadStrip
from support.chat_pilot import choose, user, words
from support.fake_engine import FACTS, FakeEngine, Wait

FULL = replace(FACTS, n_ctx=16)
LONG = "one two three four five six"


async def test_a_prompt_that_does_not_fit_drops_turns_only_when_told_to() -> None:
    engine = FakeEngine(["Short."], ["Fits."], facts=FULL)
    async with user(engine) as me:
        await me.ask(LONG)
        await me.send("a b c d e")
        await me.until(lambda: isinstance(me.app.screen, ChoiceScreen))
        assert me.texts == [LONG, "Short.", "a b c d e"]
        await choose(me, "drop")
        await me.until(lambda: me.texts[-1] == "Fits.")
        await me.ready()
        assert engine.requests[-1].messages == [{"role": "user", "content": "a b c d e"}]
        first, *_, last = me.chat.transcript.views()
        assert "not in the prompt" in str(first.query(".author").first(Static).render())
        assert "not in the prompt" not in str(last.query(".author").first(Static).render())


async def test_leaving_the_question_changes_nothing() -> None:
    async with user(FakeEngine(["Short."], facts=FULL)) as me:
        await me.ask(LONG)
        await me.send("a b c d e")
        await me.until(lambda: isinstance(me.app.screen, ChoiceScreen))
        await me.press("escape")
        assert me.texts == [LONG, "Short.", "a b c d e"]
        assert me.chat.session.conversation.dropped_id is None
        assert len(me.engine.requests) == 2


async def test_a_full_context_can_be_left_for_a_new_chat() -> None:
    async with user(FakeEngine(words("It goes on"), facts=FULL, context_full=True)) as me:
        await me.send("Go")
        await choose(me, "new")
        await me.until(lambda: me.texts == [])
        assert len(me.app.store.sessions()) == 1


async def test_the_engine_dies_and_is_started_again(store: Store) -> None:
    dying = FakeEngine(["Half", " an", EngineStoppedError("the engine stopped (SIGKILL)")])
    async with user(dying, FakeEngine(["Whole."]), store=store) as me:
        await me.send("Speak")
        await me.until(lambda: me.chat.query_one(LoadStrip).display)
        assert me.texts == ["Speak", "Half an"]
        assert me.path[-1].finish_reason == "error"
        assert "SIGKILL" in me.rendered("#load-strip")
        stored = store.session(me.chat.session.id).conversation.path()
        assert [m.content for m in stored] == ["Speak", "Half an"]
        await me.send("Still there?")
        await me.until(lambda: "no engine" in me.notes)
        await me.press("f5")
        await me.until(lambda: me.texts[-1] == "Whole.")
        assert len(me.engines) == 2
        assert me.texts == ["Speak", "Half an", "Still there?", "Whole."]


async def test_an_engine_that_was_replaced_is_not_listened_to() -> None:
    pause = Wait()
    async with user(FakeEngine(["Old", pause, " news"]), FakeEngine(["New."])) as me:
        await me.send("Speak")
        await me.until(lambda: me.texts == ["Speak", "Old"])
        await me.press("f5")
        pause.over.set()
        await me.until(lambda: len(me.engines) == 2)
        await me.ready()
        assert me.texts == ["Speak", "Old"]
        assert me.path[-1].error == "the engine was restarted"


async def test_a_model_that_can_not_be_loaded() -> None:
    broken = FakeEngine(loading=[ModelFileError("tiny.gguf: the file is empty")])
    async with user(broken, FakeEngine(["Hello."]), wait=False) as me:
        await me.until(lambda: "the file is empty" in me.rendered("#load-strip"))
        await me.send("/model other.gguf")
        await me.ready()
        assert me.asked_for[1].model == "other.gguf"
        await me.ask("Hi")
        assert me.texts == ["Hi", "Hello."]


@pytest.mark.slow
async def test_an_error_of_the_template_is_shown_and_leaves_no_answer() -> None:
    async with user(FakeEngine([LocalKVError("the chat template fails")])) as me:
        await me.send("Hi")
        await me.until(lambda: "the chat template fails" in me.notes)
        assert me.texts == ["Hi"]
        assert not me.chat.busy
