"""Chats that are kept: resumed, exported, copied and saved; a store that fails."""

from __future__ import annotations

import pytest
from textual.widgets import Input, OptionList, Static

from localkv.chat.session import ChatSession
from localkv.chat.store import Store
from localkv.errors import LocalKVError
from localkv.sampling.params import SamplingParams
from localkv.tui.dialogs import SessionsScreen
from support.chat_pilot import choose, user
from support.fake_engine import FACTS, FakeEngine, Wait


@pytest.mark.slow
async def test_sessions_are_resumed_searched_and_deleted(store: Store) -> None:
    async with user(FakeEngine(["A fox."], ["An owl."], ["More."]), store=store) as me:
        await me.ask("Tell of a fox")
        await me.press("ctrl+n")
        await me.until(lambda: me.texts == [])
        assert me.rendered("#title") == "New chat"
        await me.ask("Tell of an owl")
        await me.press("ctrl+o")
        assert isinstance(me.app.screen, SessionsScreen)
        options = me.app.screen.query_one(OptionList)
        assert options.option_count == 2
        await me.press(*"fox")
        assert options.option_count == 1
        await me.press("enter")
        await me.until(lambda: me.texts == ["Tell of a fox", "A fox."])
        await me.ask("Go on")
        assert me.texts[-1] == "More."
        await me.press("ctrl+o", "down", "ctrl+d")
        assert len(store.sessions()) == 2  # it asks first
        assert "again" in str(me.app.screen.query_one(".keys", Static).render())
        await me.press("ctrl+d")
        assert [s.title for s in store.sessions()] == ["Tell of a fox"]
        await me.press("ctrl+d", "ctrl+d", "escape")
        assert store.sessions() == []
        await me.until(lambda: me.texts == [])  # the one that was open is gone


@pytest.mark.slow
async def test_a_session_is_resumed_with_its_settings(store: Store) -> None:
    async with user(FakeEngine(["Aye."]), store=store) as me:
        await me.send("/system You are a pirate.")
        await me.send("/set temp 0.3")
        await me.ask("Hello")
        session_id = me.chat.session.id
    engine = FakeEngine(["Arr."])
    async with user(engine, store=store, session_id=session_id) as me:
        assert me.texts == ["Hello", "Aye."]
        assert me.chat.transcript.views()[-1].author == FACTS.name
        assert me.chat.query_one("#set-temperature", Input).value == "0.3"
        await me.until(lambda: me.chat.meter.n_tokens == 12)
        await me.ask("Again")
        request = engine.requests[0]
        assert request.params == SamplingParams(temperature=0.3)
        assert request.messages[0] == {"role": "system", "content": "You are a pirate."}


async def test_export(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with user(FakeEngine(["<think>\nHm\n</think>\n\nFine."])) as me:
        await me.ask("How are you?")
        await me.send("/export")
        await me.until(lambda: "written" in me.notes)
        text = (tmp_path / "how-are-you.md").read_text()
        assert text.startswith("# How are you?\n\n## You\n\nHow are you?\n\n## tiny-tales\n\n")
        assert "<summary>Reasoning</summary>\n\nHm\n" in text
        assert text.endswith("\n\nFine.\n")
        await me.send("/export")
        await me.until(lambda: "exists already" in me.notes)
        await me.send(f"/export {tmp_path}/deep/a.json")
        await me.until(lambda: "No such file" in me.notes)
        await me.send("/export a.txt")
        await me.until(lambda: "must end in .md or .json" in me.notes)


@pytest.mark.slow
async def test_copying_messages_and_code() -> None:
    answer = "Look:\n\n```python\na = 1\n```\n\nand\n\n```\nb\nc\n```\n"
    async with user(FakeEngine([answer], ["No code."])) as me:
        await me.ask("Code, please")
        await me.send("/copy")
        assert me.app.clipboard == answer.strip()
        await me.press("alt+up", "b")
        await choose(me, "1")
        assert me.app.clipboard == "b\nc"
        await me.press("up", "c")
        assert me.app.clipboard == "Code, please"
        await me.press("escape")
        await me.ask("None, please")
        await me.send("/copy code")
        await me.until(lambda: "the last answer has no code" in me.notes)


async def test_saving_and_loading_by_title() -> None:
    async with user(FakeEngine(["Ok."])) as me:
        await me.ask("Hi")
        await me.send("/save The best chat")
        assert me.rendered("#title") == "The best chat"
        await me.send("/clear")
        assert me.texts == []
        await me.send("/load best")
        await me.until(lambda: me.texts == ["Hi", "Ok."])


@pytest.mark.slow
async def test_a_long_session_opens_at_its_end(store: Store) -> None:
    session = ChatSession(store, model="m.gguf", params=SamplingParams())
    for number in range(40):
        session.say(f"question {number}")
        answer = session.begin_answer()
        session.extend(answer, f"answer {number}")
        session.keep(answer)
    async with user(FakeEngine(["More."]), store=store, session_id=session.id) as me:
        assert me.texts[0] == "question 30"
        assert me.texts[-1] == "answer 39"
        assert "60 earlier messages" in me.rendered("#earlier")
        await me.ask("And now?")
        assert me.texts[0] == "question 30"
        for first in (20, 10, 0):
            me.chat.transcript.views()[0].focus()
            await me.press("alt+up")
            assert me.texts[0] == f"question {first}"
            assert me.chat.focused.message.content == f"answer {first + 9}"
        assert me.texts[-2:] == ["And now?", "More."]
        assert not me.chat.query_one("#earlier").display


@pytest.mark.slow
async def test_a_store_that_fails_does_not_end_the_chat(monkeypatch) -> None:
    pause = Wait()

    def fail(*args: object, **named: object) -> None:
        raise LocalKVError("the disk is full")

    async with user(FakeEngine(["Half", pause, " whole"])) as me:
        await me.send("Speak")
        await me.until(lambda: me.texts == ["Speak", "Half"])
        for name in ("update_message", "update_session", "add_message"):
            monkeypatch.setattr(me.app.store, name, fail)
        pause.over.set()
        await me.ready()
        assert me.texts == ["Speak", "Half whole"]
        assert "the disk is full" in me.notes
        await me.send("Again")
        assert me.prompt.text == "Again"
        assert me.texts == ["Speak", "Half whole"]


async def test_a_store_that_fails_is_told_of_once(monkeypatch) -> None:
    pause = Wait()

    def fail(*args: object, **named: object) -> None:
        raise LocalKVError("the disk is full")

    async with user(FakeEngine(["One", " two", " three", pause])) as me:
        monkeypatch.setattr(me.app.store, "update_message", fail)
        await me.send("Speak")
        await me.until(pause.reached.is_set)
        for _ in range(3):
            await me.chat._draw_growth()
        assert me.notes.count("the disk is full") == 1
        pause.over.set()
        await me.ready()


async def test_what_is_on_the_screen_is_saved(store: Store) -> None:
    pause = Wait()
    async with user(FakeEngine(["Once", " upon", pause, " a time"]), store=store) as me:
        await me.send("A story")
        await me.until(pause.reached.is_set)
        await me.until(lambda: "upon" in me.markdown())
        kept = store.session(me.chat.session.id).conversation.path()
        assert [message.content for message in kept] == ["A story", "Once upon"]
        pause.over.set()
        await me.ready()


async def test_ctrl_d_leaves_on_an_empty_line(store: Store) -> None:
    async with user(FakeEngine(), store=store) as me:
        await me.press("h", "left", "ctrl+d")
        assert me.prompt.text == ""  # it deletes a character where there is one
        assert me.app.is_running
        await me.press("ctrl+d")
        await me.pilot.pause()
        assert me.app._exit


async def test_quitting_while_it_answers_keeps_what_there_is(store: Store) -> None:
    pause = Wait()
    async with user(FakeEngine(["Half", pause]), store=store) as me:
        await me.send("Speak")
        await me.until(lambda: me.texts == ["Speak", "Half"])
        await me.press("ctrl+q")
    (session,) = store.sessions()
    assert [m.content for m in store.session(session.id).conversation.path()] == ["Speak", "Half"]
    async with user(FakeEngine(), store=store, session_id=session.id) as me:
        assert "interrupted" in str(me.chat.query(".figures").last(Static).render())
