"""Messages that are sent while an answer is still being written."""

from __future__ import annotations

import pytest

from localkv.chat.store import Store
from localkv.errors import LocalKVError
from localkv.tui.widgets.prompt import Waiting, WaitingMessage
from support.chat_pilot import User, user
from support.fake_engine import FACTS, FakeEngine, Wait


def shown(me: User) -> list[str]:
    """The messages that wait, as they are shown."""
    return [str(row.render()) for row in me.chat.query(WaitingMessage)]


async def answering(me: User, pause: Wait) -> None:
    await me.send("Count")
    await me.until(pause.reached.is_set)


async def test_they_are_shown_and_sent_in_order() -> None:
    pause = Wait()
    engine = FakeEngine(["One", pause, " two."], ["Three."], ["Four."])
    async with user(engine) as me:
        await answering(me, pause)
        await me.send("next\nline")
        await me.send("and then")
        assert me.prompt.text == ""
        assert shown(me) == ["1  next …", "2  and then"]
        assert me.texts == ["Count", "One"] or me.texts == ["Count", ""]
        assert "Waiting" in me.screen_text()
        pause.over.set()
        await me.until(lambda: me.texts[-1] == "Four.")
        await me.ready()
        assert me.texts == ["Count", "One two.", "next\nline", "Three.", "and then", "Four."]
        assert not me.chat.query_one(Waiting).display


@pytest.mark.slow
async def test_one_is_taken_back_changed_and_keeps_its_place() -> None:
    pause = Wait()
    async with user(FakeEngine(["One", pause], ["a"], ["b"], ["c"])) as me:
        await answering(me, pause)
        for text in ("first", "second", "third"):
            await me.send(text)
        await me.press("alt+up", "up", "e")
        assert me.prompt.text == "second"
        assert shown(me) == ["1  first", "2  third"]
        await me.press(*"!", "enter")
        await me.until(lambda: shown(me) == ["1  first", "2  second!", "3  third"])
        pause.over.set()
        await me.until(lambda: me.texts[-1] == "c")
        assert me.texts[2::2] == ["first", "second!", "third"]


async def test_up_in_an_empty_prompt_takes_the_last_back() -> None:
    pause = Wait()
    async with user(FakeEngine(["One", pause])) as me:
        await answering(me, pause)
        await me.send("next")
        await me.press("up")
        await me.until(lambda: me.prompt.text == "next")
        assert shown(me) == []
        pause.over.set()
        await me.ready()
        assert me.texts == ["Count", "One"]


@pytest.mark.slow
async def test_one_is_removed() -> None:
    pause = Wait()
    async with user(FakeEngine(["One", pause], ["Done."])) as me:
        await answering(me, pause)
        await me.send("not this")
        await me.send("but this")
        await me.press("alt+up", "up", "delete")
        await me.until(lambda: shown(me) == ["1  but this"])
        pause.over.set()
        await me.until(lambda: me.texts == ["Count", "One", "but this", "Done."])


@pytest.mark.slow
async def test_after_a_stop_they_wait_for_enter() -> None:
    pause = Wait()
    async with user(FakeEngine(["One", pause], ["Two."])) as me:
        await answering(me, pause)
        await me.until(lambda: me.texts[-1] == "One")
        await me.send("next")
        await me.press("escape")
        await me.ready()
        assert me.texts == ["Count", "One"]
        assert shown(me) == ["1  next"]
        assert "Enter sends the first" in me.screen_text()
        await me.press("enter")
        await me.until(lambda: me.texts == ["Count", "One", "next", "Two."])


async def test_before_the_model_is_loaded() -> None:
    loading = Wait()
    async with user(FakeEngine(["1"], ["2"], loading=[loading]), wait=False) as me:
        await me.until(loading.reached.is_set)
        await me.send("a")
        await me.send("b")
        assert shown(me) == ["1  b"]
        loading.over.set()
        await me.until(lambda: me.texts == ["a", "1", "b", "2"])


@pytest.mark.slow
async def test_another_session_gets_none_of_them() -> None:
    pause = Wait()
    async with user(FakeEngine(["One", pause])) as me:
        await answering(me, pause)
        await me.send("next")
        await me.write("draft")
        await me.press("escape")
        await me.ready()
        await me.press("ctrl+n")
        await me.until(lambda: me.texts == [])
        assert me.prompt.text == "next\n\ndraft"
        assert shown(me) == []


async def test_one_that_can_not_be_stored_stays(store: Store, monkeypatch) -> None:
    pause = Wait()

    def fail(*args: object, **named: object) -> None:
        raise LocalKVError("the disk is full")

    async with user(FakeEngine(["One", pause]), store=store) as me:
        await answering(me, pause)
        await me.send("next")
        monkeypatch.setattr(me.app.store, "add_message", fail)
        pause.over.set()
        await me.ready()
        await me.until(lambda: "the disk is full" in me.notes)
        assert shown(me) == ["1  next"]


async def test_commands_do_not_wait() -> None:
    pause = Wait()
    async with user(FakeEngine(["One", pause])) as me:
        await answering(me, pause)
        await me.send("/set temp 0.5")
        await me.until(lambda: "temp is 0.5" in me.notes)
        assert shown(me) == []
        pause.over.set()
        await me.ready()


async def test_nothing_in_them_steers_the_terminal() -> None:
    pause = Wait()
    async with user(FakeEngine(["One", pause])) as me:
        await answering(me, pause)
        await me.send("\x1b[2J [bold]x")
        assert shown(me) == ["1  ␛[2J [bold]x"]
        assert me.chat.meter.facts == FACTS
        pause.over.set()


async def test_quitting_asks_first() -> None:
    pause = Wait()
    async with user(FakeEngine(["One", pause])) as me:
        await answering(me, pause)
        await me.send("next")
        await me.press("ctrl+q")
        assert "1 message not sent yet: Ctrl+Q again quits" in me.notes
        assert me.app.is_running
        await me.press("ctrl+q")
        await me.until(lambda: me.app._exit)
