"""The chat as a user meets it, with scripted engines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from textual.widgets import Collapsible, Input, OptionList, Static

from localkv.chat.engine import EngineStoppedError
from localkv.chat.session import ChatSession
from localkv.chat.store import Store
from localkv.errors import LocalKVError, ModelFileError
from localkv.sampling.params import SamplingParams
from localkv.tui.choice_screen import ChoiceScreen
from localkv.tui.figures import columns
from localkv.tui.help_screen import HelpScreen
from localkv.tui.sessions_screen import SessionsScreen
from localkv.tui.widgets.load_strip import LoadStrip
from localkv.tui.widgets.message_view import MessageView
from support.chat_pilot import User, user, words
from support.fake_engine import FACTS, FakeEngine, Wait


async def test_a_question_is_answered_and_kept(store: Store) -> None:
    async with user(FakeEngine(words("It is **blue** today.")), store=store) as me:
        await me.ask("What colour is the sky?")
        assert me.texts == ["What colour is the sky?", "It is **blue** today."]
        assert me.markdown() == "It is blue today."
        assert me.prompt.text == ""
        assert "4 tokens · 50.0 tokens/s" in str(me.chat.query(".figures").last(Static).render())
        assert me.rendered("#title") == "What colour is the sky?"
        (session,) = store.sessions()
        assert (session.title, session.n_messages) == ("What colour is the sky?", 2)


async def test_it_can_be_written_before_the_model_is_loaded() -> None:
    loading = Wait()
    async with user(FakeEngine(["Yes."], loading=[loading]), wait=False) as me:
        await me.until(loading.reached.is_set)
        await me.until(lambda: "weights 3/16" in me.rendered("#load-strip"))
        await me.send("Are you there?")
        assert me.texts == ["Are you there?"]
        loading.over.set()
        await me.until(lambda: me.texts == ["Are you there?", "Yes."])
        await me.ready()
        assert not me.chat.query_one(LoadStrip).display


async def test_escape_before_the_model_is_loaded_takes_the_wish_back() -> None:
    loading = Wait()
    async with user(FakeEngine(["Yes."], loading=[loading]), wait=False) as me:
        await me.send("Are you there?")
        await me.press("escape")
        loading.over.set()
        await me.ready()
        assert me.texts == ["Are you there?"]
        await me.press("ctrl+r")
        await me.until(lambda: me.texts == ["Are you there?", "Yes."])


async def test_escape_stops_and_keeps_text_and_model() -> None:
    pause = Wait()
    engine = FakeEngine(["Once", " upon", pause, " a time"], ["Another."])
    async with user(engine) as me:
        await me.send("A story")
        await me.until(pause.reached.is_set)
        await me.until(lambda: "upon" in me.markdown())
        await me.press("escape")
        await me.ready()
        assert me.texts == ["A story", "Once upon"]
        assert me.path[-1].finish_reason == "cancelled"
        assert "stopped" in str(me.chat.query(".figures").last(Static).render())
        await me.ask("Go on")
        assert me.texts[-1] == "Another."
        assert me.engines == [engine]
        assert [m["content"] for m in engine.requests[1].messages] == [
            "A story",
            "Once upon",
            "Go on",
        ]


async def test_ctrl_c_ends_neither_the_chat_nor_the_answer() -> None:
    pause = Wait()
    async with user(FakeEngine(["One", pause, " two."])) as me:
        await me.send("Count")
        await me.until(pause.reached.is_set)
        await me.press("ctrl+c")
        assert "Ctrl+Q quits" in me.notes
        pause.over.set()
        await me.ready()
        assert me.texts == ["Count", "One two."]


async def test_escape_while_the_prompt_is_read_leaves_no_empty_answer() -> None:
    pause = Wait()
    async with user(FakeEngine([pause])) as me:
        await me.send("A story")
        await me.until(pause.reached.is_set)
        assert "reading the prompt" in str(me.chat.query(".figures").last(Static).render())
        await me.press("escape")
        await me.ready()
        assert me.texts == ["A story"]


async def test_typing_while_it_answers() -> None:
    pause = Wait()
    async with user(FakeEngine(["One", pause, " two."], ["Three."])) as me:
        await me.send("Count")
        await me.until(pause.reached.is_set)
        await me.press(*"next")
        assert me.prompt.text == "next"
        pause.over.set()
        await me.ready()
        assert me.prompt.text == "next"
        await me.press("enter")
        await me.until(lambda: me.texts == ["Count", "One two.", "next", "Three."])


async def test_newlines_are_typed_with_ctrl_j_and_shift_enter() -> None:
    async with user(FakeEngine(["Ok."])) as me:
        await me.press("a", "ctrl+j", "b", "shift+enter", "c")
        assert me.prompt.text == "a\nb\nc"
        await me.ask("")
        assert me.texts[0] == "a\nb\nc"


async def test_blank_prompts_are_not_sent() -> None:
    async with user(FakeEngine()) as me:
        await me.send("  \n ")
        assert me.texts == []


async def test_regenerating_makes_a_branch_beside_the_answer() -> None:
    async with user(FakeEngine(["First."], ["Second."])) as me:
        await me.ask("Say something")
        await me.press("ctrl+r")
        await me.until(lambda: me.texts == ["Say something", "Second."])
        await me.ready()
        assert "‹ 2 of 2 ›" in str(me.chat.query(".author").last(Static).render())
        await me.press("alt+up", "left")
        assert me.texts == ["Say something", "First."]
        assert isinstance(me.chat.focused, MessageView)
        await me.press("left")  # there is none before it
        assert me.texts == ["Say something", "First."]
        await me.press("right")
        assert me.texts == ["Say something", "Second."]


async def test_editing_a_message_begins_a_branch() -> None:
    engine = FakeEngine(["A1"], ["A2"], ["B1"])
    async with user(engine) as me:
        await me.ask("Q1")
        await me.ask("Q2")
        await me.press("alt+up", "up", "up", "up", "e")
        assert me.prompt.text == "Q1"
        assert "Editing" in me.rendered("#editing")
        await me.press(*"!", "enter")
        await me.until(lambda: me.texts == ["Q1!", "B1"])
        await me.ready()
        assert engine.requests[-1].messages == [{"role": "user", "content": "Q1!"}]
        await me.press("alt+up", "up", "left")
        assert me.texts == ["Q1", "A1", "Q2", "A2"]


async def test_escape_gives_up_an_edit() -> None:
    async with user(FakeEngine(["A1"])) as me:
        await me.ask("Q1")
        await me.press("alt+up", "up", "e", "escape")
        assert me.prompt.text == ""
        assert not me.chat.query_one("#editing").display
        assert me.chat.editing is None


async def test_reasoning_is_folded_and_not_told_again() -> None:
    pause = Wait()
    engine = FakeEngine(
        ["<thi", "nk>\nLet me", " see.", pause, "</think", ">\n\nIt is 4."], ["Yes."]
    )
    async with user(engine) as me:
        await me.send("2 + 2?")
        await me.until(pause.reached.is_set)
        reasoning = me.chat.query_one(Collapsible)
        await me.until(lambda: reasoning.display)
        assert reasoning.title == "Thinking … 3 words"
        assert me.markdown() == ""
        pause.over.set()
        await me.ready()
        assert reasoning.title == "Thought for 3 words"
        assert me.markdown() == "It is 4."
        assert reasoning.collapsed
        await me.press("ctrl+t")
        assert not reasoning.collapsed
        await me.press("ctrl+t")
        assert reasoning.collapsed
        await me.ask("Sure?")
        assert [m["content"] for m in engine.requests[1].messages] == [
            "2 + 2?",
            "It is 4.",
            "Sure?",
        ]


async def test_the_history_of_prompts(store: Store) -> None:
    async with user(FakeEngine(["1"], ["2"]), store=store) as me:
        await me.ask("older")
        await me.ask("newer")
    async with user(FakeEngine(), store=store) as me:
        await me.write("draft")
        await me.press("up")
        assert me.prompt.text == "newer"
        await me.press("up")
        assert me.prompt.text == "older"
        await me.press("up")
        assert me.prompt.text == "older"
        await me.press("down", "down")
        assert me.prompt.text == "draft"


async def test_up_moves_within_several_lines_first() -> None:
    async with user(FakeEngine(["1"])) as me:
        await me.ask("older")
        await me.write("a\nb")
        await me.press("up")
        assert me.prompt.text == "a\nb"
        await me.press("up")
        assert me.prompt.text == "older"


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


async def choose(me: User, answer: str) -> None:
    """Answer a question."""
    await me.until(lambda: isinstance(me.app.screen, ChoiceScreen))
    options = me.app.screen.query_one(OptionList)
    options.highlighted = options.get_option_index(answer)
    await me.press("enter")


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


async def test_an_error_of_the_template_is_shown_and_leaves_no_answer() -> None:
    async with user(FakeEngine([LocalKVError("the chat template fails")])) as me:
        await me.send("Hi")
        await me.until(lambda: "the chat template fails" in me.notes)
        assert me.texts == ["Hi"]
        assert not me.chat.busy


async def test_the_meter_shows_what_the_cache_really_takes() -> None:
    async with user(FakeEngine(words("a b c d"))) as me:
        await me.ask("one two")
        meter = me.rendered("#meter")
        # 16 layers of 8 heads of 64, 1,024 tokens: blocks of 32 values in 18 and in 34 bytes
        assert "8 of 1,024" in meter
        assert "1,016 tokens left" in meter
        assert "K q4_0      4.50 MiB" in meter
        assert "V q8_0      8.50 MiB" in meter
        assert "41% of f16's 32.0 MiB" in meter
        assert "prompt reused" in meter


async def test_reused_tokens_are_shown() -> None:
    async with user(FakeEngine(["a"], ["b"])) as me:
        await me.ask("one")
        await me.ask("two")
        assert "3 of 9" in me.rendered("#meter")


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
        assert "top_p must be between 0 and 1" in me.notes
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
    [
        ("/set", "temperature"),
        ("/set temp 0.5", "temp is 0.5"),
        ("/set max-tokens 9", "max-tokens is 9"),
        ("/set temp", "give a name and a value"),
        ("/set nonsense 1", "no such setting 'nonsense'"),
        ("/set seed x", "'x' is not a whole number"),
        ("/set temp -1e999", "temperature must be a finite number"),
        ("/system Be brief", "system prompt: Be brief"),
        ("/save Title", "nothing to save yet"),
        ("/load nothing", "no session has 'nothing' in it"),
        ("/copy", "there is no answer to copy"),
        ("/stats", "loaded in 2.5 s"),
        ("/model", "tiny-tales, llama, 770 MiB"),
        ("/nonsense", "no such command /nonsense"),
    ],
)
async def test_slash_commands(command: str, answer: str) -> None:
    async with user(FakeEngine()) as me:
        await me.send(command)
        await me.until(lambda: answer in me.notes)
        assert me.texts == []
        assert me.prompt.text == ""


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


async def test_resizing_hides_the_panel_and_shows_the_line() -> None:
    async with user(FakeEngine(["Ok. " * 200])) as me:
        await me.ask("Hi")
        panel, line = me.chat.query_one("#panel"), me.chat.query_one("#status")
        assert panel.display
        assert not line.display
        await me.pilot.resize_terminal(80, 24)
        await me.until(lambda: not panel.display)
        assert line.display
        assert "of 1,024" in me.rendered("#status")
        await me.press("f2")
        assert panel.display
        await me.pilot.resize_terminal(20, 8)
        await me.pilot.pause()
        await me.pilot.resize_terminal(120, 40)
        await me.until(lambda: not panel.display)
        await me.press("f2")
        assert panel.display


async def test_a_very_long_answer_is_followed_until_somebody_scrolls() -> None:
    lines = [f"line {i}\n\n" for i in range(400)]
    pause = Wait()
    async with user(FakeEngine([*lines, pause, "the end"])) as me:
        await me.send("Write")
        await me.until(pause.reached.is_set)
        await me.until(lambda: "line 399" in me.markdown())
        transcript = me.chat.transcript
        await me.until(lambda: transcript.max_scroll_y > 400)
        await me.until(lambda: transcript.scroll_y == transcript.max_scroll_y)
        transcript.scroll_home(animate=False)
        await me.pilot.pause()
        pause.over.set()
        await me.ready()
        assert transcript.scroll_y < 10
        assert me.markdown().endswith("the end")


async def test_wide_characters_emoji_and_control_characters() -> None:
    answer = "日本語のテキスト 👩‍👩‍👧‍👦 🇩🇪 é\x1b[2J\x07 <b>bold</b>\nnext line"
    async with user(FakeEngine([answer]), size=(80, 24)) as me:
        await me.ask("混ぜる 🦊")
        shown = me.screen_text()
        assert "日本語のテキスト" in shown
        assert "混ぜる 🦊" in shown
        assert "<b>bold</b>" in shown
        assert "\x1b" not in shown
        assert "␛[2J" in shown
        assert "\n   next line" in shown.replace("▌", " ")
        assert me.texts[1] == answer


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


def test_columns_rise_from_zero() -> None:
    assert columns([], 3, 2) == ["   ", "   "]
    assert columns([0.0, 0.0], 3, 1) == [" ▁▁"]
    assert columns([5.0], 2, 2) == [" █", " █"]
    assert columns([1.0, 2.0, 3.0, 4.0], 4, 2) == ["  ▄█", "▄███"]
    assert columns(range(1, 100), 2, 1) == ["██"]
