"""The parts around the conversation: messages of the program, the footer, the meter, the prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from textual._xterm_parser import XTermParser
from textual.widgets._toast import Toast

from localkv.tui import app as app_module
from localkv.tui.widgets.transcript import Transcript
from support.chat_pilot import User, user, words
from support.fake_engine import FACTS, FakeEngine, Wait

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
async def test_messages_of_the_program_cover_no_text(size: tuple[int, int]) -> None:
    pause = Wait()
    async with user(FakeEngine([*words("line\n\n" * 40), pause]), size=size) as me:
        await me.send("Write")
        await me.until(pause.reached.is_set)
        me.app.notify("First Esc")
        me.app.notify("Not so fast", severity="warning")
        await me.pilot.pause(0.1)
        toasts = [toast.region for toast in me.app.screen.query(Toast)]
        assert len(toasts) == 2
        for widget in (me.chat.query_one(Transcript), me.prompt, me.chat.query_one("#title-bar")):
            assert not any(widget.region.overlaps(toast) for toast in toasts)
        assert "First Esc" in me.screen_text()
        assert "Not so fast" in me.screen_text()
        pause.over.set()


async def test_a_message_is_not_repeated_while_it_shows() -> None:
    async with user(FakeEngine()) as me:
        for _ in range(3):
            await me.press("ctrl+c")
        assert me.notes.count("Ctrl+Q quits") == 1


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 104, 160])
async def test_the_footer_is_never_cut(width: int) -> None:
    async with user(FakeEngine(["Hi."]), size=(width, 24)) as me:
        await me.ask("Hello")
        for keys in ((), ("alt+up",)):
            await me.press(*keys)
            await me.pilot.pause(0.1)
            footer = me.chat.query_one("FittingFooter")
            keys_shown = list(me.chat.query("FooterKey"))
            assert keys_shown
            assert any(key.action == "help" for key in keys_shown)
            right = 0
            for key in keys_shown:
                assert footer.region.contains_region(key.region)
                assert key.description in me.screen_text().splitlines()[-1]
                assert key.region.x >= right or key.has_class("-command-palette")
                right = key.region.right
            assert footer.max_scroll_x == 0


@pytest.mark.parametrize(
    ("types", "shown", "hidden"),
    [
        (("q4_0", "q8_0"), ["K q4_0  V q8_0", "f16: 32.0 MiB"], []),
        (("q8_0", "q8_0"), ["KV q8_0", "f16: 32.0 MiB"], ["K q8_0"]),
        (("f16", "f16"), ["KV f16", "32.0 MiB"], ["f16:"]),
    ],
)
async def test_the_line_says_what_differs(
    types: tuple[str, str], shown: list[str], hidden: list[str]
) -> None:
    facts = replace(FACTS, type_k=types[0], type_v=types[1])
    async with user(FakeEngine(facts=facts), size=(100, 24)) as me:
        line = me.rendered("#status")
        assert all(text in line for text in shown)
        assert not any(text in line for text in hidden)


async def type_on_terminal(me: User, text: str) -> None:
    """Type what a pilot's keys can't: it has no names for all characters."""
    for key in XTermParser(False).feed(text):
        me.app._driver.send_message(key)
        await me.pilot.pause()


@pytest.mark.parametrize("text", ["👩\u200d🚀", "می\u200cخواهم", "a\u00adb"])
async def test_characters_that_join_can_be_typed(text: str) -> None:
    async with user(FakeEngine(["Ok."])) as me:
        await type_on_terminal(me, text)
        assert me.prompt.text == text
        await me.press("ctrl+underscore")
        assert me.prompt.text != text


async def test_overrides_of_direction_can_not() -> None:
    async with user(FakeEngine()) as me:
        await type_on_terminal(me, "a\u202eb")
        assert me.prompt.text == "ab"


async def test_ctrl_z_is_the_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(app_module, "has_shell", lambda: True)
    monkeypatch.setattr(app_module.os, "killpg", lambda *args: sent.append(args))
    async with user(FakeEngine()) as me:
        await me.write("text")
        await me.press("ctrl+z")
        assert sent == [(0, app_module.signal.SIGTSTP)]
        assert me.prompt.text == "text"
        monkeypatch.setattr(app_module, "has_shell", lambda: False)
        await me.press("ctrl+z")
        assert "no shell to come back from" in me.notes
        assert len(sent) == 1
