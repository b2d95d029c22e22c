"""The chat as a user meets it, with scripted engines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from textual.widgets import Collapsible, Static

from localkv.chat.engine import PromptProgress
from localkv.chat.store import Store
from localkv.tui.figures import columns
from localkv.tui.widgets.engine_view import LoadStrip
from localkv.tui.widgets.transcript import MessageView, PromptReading
from support.chat_pilot import user, words
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


@pytest.mark.slow
async def test_blank_prompts_are_not_sent() -> None:
    async with user(FakeEngine()) as me:
        await me.send("  \n ")
        assert me.texts == []


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
async def test_up_moves_within_several_lines_first() -> None:
    async with user(FakeEngine(["1"])) as me:
        await me.ask("older")
        await me.write("a\nb")
        await me.press("up")
        assert me.prompt.text == "a\nb"
        await me.press("up")
        assert me.prompt.text == "older"


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


async def test_the_meter_of_a_budget_names_no_types_that_pages_do_not_have() -> None:
    """K and V share the bytes; their pages have several types."""
    ladder = ("f16/f16", "q8_0/q8_0", "q4_0/q4_0")
    facts = replace(FACTS, type_k="f16", type_v="f16", kv_budget=8 << 20, kv_ladder=ladder)
    async with user(FakeEngine(words("a b c d"), facts=facts)) as me:
        assert "KV f16/f16 to q4_0/q4_0" in me.screen_text()
        assert "f16 would take 32.0 MiB" in me.screen_text()
        meter = me.rendered("#meter")
        assert "K and V     8.00 MiB" in meter
        assert "f16         32.0 MiB" in meter
        assert "25% of f16's 32.0 MiB" in meter
        assert "K f16" not in meter


async def test_figures_of_an_answer_stand_apart_from_their_names() -> None:
    fake = FakeEngine(["a"])
    fake.guesses = {"requantised_pages": 3, "lost_tokens": 2}
    async with user(fake) as me:
        await me.ask("one")
        await me.send("/stats")
        assert "requantised 3 pages in 0.00 s" in me.notes
        assert "not reused  2 tokens" in me.notes


async def test_reused_tokens_are_shown() -> None:
    async with user(FakeEngine(["a"], ["b"])) as me:
        await me.ask("one")
        await me.ask("two")
        assert "3 of 9" in me.rendered("#meter")


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_columns_rise_from_zero() -> None:
    assert columns([], 3, 2) == ["   ", "   "]
    assert columns([0.0, 0.0], 3, 1) == [" ▁▁"]
    assert columns([5.0], 2, 2) == [" █", " █"]
    assert columns([1.0, 2.0, 3.0, 4.0], 4, 2) == ["  ▄█", "▄███"]
    assert columns(range(1, 100), 2, 1) == ["██"]


async def test_a_long_prompt_shows_how_far_it_is_read() -> None:
    first, then = Wait(), Wait()
    script = [PromptProgress(0, 6000), first, PromptProgress(2048, 6000, 1024), then, "Yes."]
    async with user(FakeEngine(script)) as me:

        def figures() -> str:
            return str(me.chat.query(".figures").last(Static).render())

        await me.send("A long text")
        await me.until(first.reached.is_set)
        await me.until(lambda: figures() == "reading the prompt: 0 of 6,000 tokens …")
        first.over.set()
        await me.until(lambda: "2,048 of 6,000 tokens, " in figures())
        assert figures().endswith((" s left", " min left"))
        assert me.chat.meter.n_tokens == 2048
        then.over.set()
        await me.ready()
        assert me.texts[-1] == "Yes."
        assert "reading" not in figures()


def test_the_seconds_left_of_a_prompt_are_those_of_its_rate() -> None:
    now = 0.0
    reading = PromptReading(lambda: now)
    assert reading.in_words() == "reading the prompt …"
    reading.note(PromptProgress(0, 9000))
    now = 2.0
    reading.note(PromptProgress(2000, 9000, 1000))  # a thousand in two seconds
    assert reading.in_words() == "reading the prompt: 2,000 of 9,000 tokens, 14 s left"
    now = 5.0
    assert reading.in_words().endswith("11 s left")
    now = 60.0  # as one that stands still for a while
    assert reading.in_words().endswith("tokens, 0 s left")
    reading.note(PromptProgress(2001, 9000, 1000))
    assert reading.in_words().endswith("7:00 min left")


async def test_a_prompt_that_was_not_read_to_its_end_is_counted() -> None:
    pause = Wait()
    async with user(FakeEngine([PromptProgress(2048, 6000), pause])) as me:
        await me.send("A long text")
        await me.until(lambda: me.chat.meter.n_tokens == 2048)
        await me.press("escape")
        await me.until(lambda: me.chat.meter.n_tokens == 5)
        assert me.texts == ["A long text"]


async def test_ctrl_d_asks_like_ctrl_q_where_messages_wait() -> None:
    pause = Wait()
    async with user(FakeEngine(["One", pause])) as me:
        await me.send("Count")
        await me.until(pause.reached.is_set)
        await me.send("And then?")
        await me.press("ctrl+d")
        await me.until(lambda: "1 message not sent yet" in me.notes)
        assert me.app.is_running
        await me.press("ctrl+d")
        await me.until(lambda: not me.app.is_running)
