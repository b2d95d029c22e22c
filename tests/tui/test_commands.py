"""Settings, slash commands, the palette and the help."""

from __future__ import annotations

import pytest
from textual.widgets import Input, Static

from localkv.chat.store import Store
from localkv.sampling.params import SamplingParams
from localkv.tui.dialogs import HelpScreen
from support.chat_pilot import user
from support.fake_engine import FakeEngine
from support.quick import quick


async def test_settings_in_the_panel() -> None:
    engine = FakeEngine(["Ok."])
    async with user(engine) as me:
        field = me.chat.query_one("#set-top_k", Input)
        field.focus()
        field.value = "7"
        await me.press("enter")
        field = me.chat.query_one("#set-top_p", Input)
        field.focus()
        field.value = "1.5"
        await me.press("enter")
        assert "top_p must be from 0 to 1" in me.notes
        assert field.has_class("-invalid")
        field.value = "lots"
        await me.press("enter")
        assert "'lots' is not a number" in me.notes
        me.chat.query_one("#system-prompt").focus()
        await me.press(*"Hm")
        me.prompt.focus()
        await me.ask("Hi")
        assert engine.requests[0].params == SamplingParams(top_k=7)
        assert engine.requests[0].messages[0]["content"] == "Hm"


@pytest.mark.parametrize(
    ("command", "answer"),
    quick(
        [
            ("/set", "temperature"),
            ("/set temp 0.5", "temp is 0.5"),
            ("/set max-tokens 9", "max-tokens is 9"),
            ("/set temp", "give a name and a value"),
            ("/set nonsense 1", "no such setting 'nonsense'"),
            ("/set seed x", "'x' is not a whole number"),
            ("/set temp -1e999", "temperature must be from -1e+30 to 1e+30"),
            ("/system Be brief", "system prompt: Be brief"),
            ("/save Title", "nothing to save yet"),
            ("/load nothing", "no session has 'nothing' in it"),
            ("/copy", "there is no answer to copy"),
            ("/stats", "loaded in 2.5 s"),
            ("/model", "tiny-tales, llama, 770 MiB"),
            ("/nonsense", "no such command /nonsense"),
        ],
        [("/set temp 0.5", "temp is 0.5"), ("/nonsense", "no such command /nonsense")],
    ),
)
async def test_slash_commands(command: str, answer: str) -> None:
    async with user(FakeEngine()) as me:
        await me.send(command)
        await me.until(lambda: answer in me.notes)
        assert me.texts == []
        assert me.prompt.text == ""


async def test_guesses_are_counted() -> None:
    engine = FakeEngine(["A folder."])
    engine.guesses = {"drafted_tokens": 9, "accepted_tokens": 6, "verified_batches": 2}
    async with user(engine) as me:
        line = me.app.screen.query_one("#guesses")
        assert not line.display
        await me.ask("Hi")
        await me.until(lambda: line.display)
        assert "6 of 9 right" in str(line.render())
        await me.send("/stats")
        await me.until(lambda: "6 of 9 right (67%), in 2 verifications" in me.notes)


async def test_a_path_is_no_command() -> None:
    async with user(FakeEngine(["A folder."])) as me:
        await me.ask("/usr/bin is what?")
        assert me.texts == ["/usr/bin is what?", "A folder."]


async def test_commands_are_hinted_at_and_completed() -> None:
    async with user(FakeEngine()) as me:
        await me.press("/", "s")
        hints = me.rendered("#hints")
        assert "/set NAME VALUE" in hints
        assert "/stats" in hints
        assert "/clear" not in hints
        await me.press("t", "tab")
        assert me.prompt.text == "/stats "
        await me.press("enter")
        await me.until(lambda: "loaded in" in me.notes)
        assert not me.chat.query_one("#hints").display


async def test_help_lists_every_command_and_closes() -> None:
    from localkv.tui.slash_commands import COMMANDS

    async with user(FakeEngine(), size=(80, 24)) as me:
        await me.press("f1")
        assert isinstance(me.app.screen, HelpScreen)
        text = str(me.app.screen.query_one(Static).render())
        assert all(command.usage in text for command in COMMANDS)
        assert max(map(len, text.splitlines())) <= 70
        await me.press("escape")
        assert me.app.screen is me.chat


async def test_the_command_palette_starts_a_new_chat() -> None:
    async with user(FakeEngine(["Ok."])) as me:
        await me.ask("Hi")
        await me.press("ctrl+p")
        await me.press(*"new chat")
        await me.pilot.pause(0.5)
        await me.press("enter")
        await me.until(lambda: me.texts == [])


async def test_the_theme_is_remembered(store: Store) -> None:
    async with user(FakeEngine(), store=store) as me:
        assert me.app.theme == "localkv"
        me.app.theme = "localkv-light"
        await me.pilot.pause()
    async with user(FakeEngine(), store=store) as me:
        assert me.app.theme == "localkv-light"
