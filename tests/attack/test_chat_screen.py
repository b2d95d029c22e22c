"""The chat's screen over a file of sessions that is hostile, damaged or used by others."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from textual.widgets import OptionList

from localkv.chat.session import ChatSession
from localkv.chat.store import Store
from localkv.errors import LocalKVError
from localkv.sampling.params import SamplingParams
from localkv.tui.dialogs import SessionsScreen
from support.chat_pilot import user
from support.fake_engine import FakeEngine
from support.quick import quick

TITLES = [
    "[bold red]x[/] [/] [@click=app.quit]",
    "\x1b]52;c;YQ==\x07\x1b[2J\x1b[31m",
    "a\nb\r\nc\td",
    "e\u0301" * 500 + "\u202e\u2066",
    "x" * 300_000,
    "日本" * 200,
    "",
    " \n ",
    "\0\x7f\x9b31m",
    "$foreground {0} %s \\",
]


def said(store: Store, text: str = "Hello") -> ChatSession:
    chat = ChatSession(store, model="m", params=SamplingParams())
    chat.say(text)
    return chat


@pytest.mark.slow
async def test_hostile_titles_are_lines_of_text(store: Store) -> None:
    for title in TITLES:
        chat = said(store)
        chat.title = title
        chat.save()
    async with user(FakeEngine(["Yes."]), store=store) as me:
        await me.press("ctrl+o")
        assert isinstance(me.app.screen, SessionsScreen)
        options = me.app.screen.query_one(OptionList)
        assert options.option_count == len(TITLES)
        for _ in TITLES:
            shown = me.screen_text()
            assert not any(c < " " for c in shown if c != "\n")
            await me.press("down")
        await me.press("escape")
        for summary in store.sessions():
            await me.chat.open_session(summary.id)
            await me.pilot.pause()
            assert not any(c < " " for c in me.screen_text() if c != "\n")
            me.rendered("#title")


@pytest.mark.slow
async def test_a_session_that_is_damaged_is_said_and_others_open(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "chats")) as store:
        good, bad = said(store, "Good"), said(store, "Bad")
        with closing(sqlite3.connect(tmp_path / "chats")) as db, db:
            db.execute("UPDATE sessions SET settings = '{' WHERE id = ?", (bad.id,))
        async with user(FakeEngine(["Yes."]), store=store) as me:
            await me.press("ctrl+o", "enter")
            await me.until(lambda: "--repair" in me.notes)
            assert f"session {bad.id} is damaged" in me.notes
            await me.press("ctrl+o", "down", "enter")
            await me.until(lambda: me.texts == ["Good"])
            assert good.id == me.chat.session.id


@pytest.mark.slow
async def test_a_session_that_another_chat_deletes(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "chats")) as store, closing(Store(tmp_path / "chats")) as other:
        said(store, "Gone")
        async with user(FakeEngine(["One."], ["Two."], ["Three."]), store=store) as me:
            await me.press("ctrl+o")
            other.delete_session(other.sessions()[0].id)
            await me.press("enter")
            await me.until(lambda: "there is no session" in me.notes)
            await me.ask("First")
            other.delete_session(me.chat.session.id)
            await me.send("Second")
            await me.until(lambda: "another chat has deleted this session" in me.notes)
            assert me.texts == ["First", "One."]
            assert me.prompt.text == "Second"
            await me.press("ctrl+n")
            await me.until(lambda: me.texts == [])


@pytest.mark.slow
async def test_new_sessions_of_another_chat_are_listed(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "chats")) as store, closing(Store(tmp_path / "chats")) as other:
        async with user(FakeEngine(["One."]), store=store) as me:
            for n_sessions in (1, 2):
                said(other, f"There {n_sessions}")
                await me.press("ctrl+o")
                options = me.app.screen.query_one(OptionList)
                assert options.option_count == n_sessions
                await me.press("escape")


@pytest.mark.parametrize(
    "name", quick(["prompts", "preference", "sessions", "delete_session"], ["prompts", "sessions"])
)
async def test_a_file_that_fails_ends_nothing(store: Store, monkeypatch, name: str) -> None:
    said(store)

    def fail(*args: object, **named: object) -> None:
        raise LocalKVError("[/it] is damaged")

    monkeypatch.setattr(store, name, fail)
    async with user(FakeEngine(["Yes."]), store=store) as me:
        await me.press("ctrl+o")
        assert isinstance(me.app.screen, SessionsScreen)
        shown = me.screen_text()
        await me.press("ctrl+d", "ctrl+d")
        assert "[/it] is damaged" in me.notes + shown
        await me.press("escape")
        await me.ask("Still there?")
        assert me.texts == ["Still there?", "Yes."]


async def test_a_theme_that_can_not_be_kept_is_said(store: Store, monkeypatch) -> None:
    def fail(*args: object) -> None:
        raise LocalKVError("[/it] is full")

    monkeypatch.setattr(store, "set_preference", fail)
    async with user(FakeEngine(), store=store) as me:
        me.app.theme = "localkv-light"
        await me.until(lambda: "[/it] is full" in me.notes)
