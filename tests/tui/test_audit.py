"""/audit: the panel, the marks in the text, and audits while nobody presses a key."""

from __future__ import annotations

from dataclasses import replace

import pytest
from textual.widgets import Static

from localkv.chat.engine import Audited
from localkv.errors import LocalKVError
from localkv.tui import chat_audit
from localkv.tui.chat_audit import MARK, AuditScreen, ChatAudit, marked_text
from support.chat_pilot import User, user, words
from support.fake_engine import FACTS, FakeEngine, Wait

TEXT = "The red fox ran."
FOUND = Audited(
    line="1 of 5 tokens with another most likely choice than f16's",
    text=TEXT,
    n_tokens=5,
    kld_mean=0.0123,
    flips=("token 2: ' red' 0.41 -> ' blue' 0.47",),
    starts=(3,),
    ends=(7,),
)


def engine(*answers: str) -> FakeEngine:
    fake = FakeEngine(*(words(answer) for answer in answers))
    fake.finds = FOUND
    return fake


def figures(me: User) -> str:
    shown = me.chat.query_one(ChatAudit)
    return str(shown.render()) if shown.display else ""


def shows_audit(me: User) -> bool:
    return isinstance(me.app.screen, AuditScreen)


async def test_the_panel_marks_the_flips() -> None:
    fake = engine(TEXT)
    async with user(fake) as me:
        await me.ask("Hi")
        assert figures(me) == ""
        await me.send("/audit")
        await me.until(lambda: shows_audit(me))
        assert FOUND.line in me.rendered("#audit-line")
        assert me.rendered("#audit-text") == TEXT
        assert FOUND.flips[0] in me.rendered("#audit-flips")
        await me.press("escape")
        assert "1 of 5" in figures(me)
        assert "KLD 0.012" in figures(me)
        await me.send("/audit")  # known by now
        await me.until(lambda: shows_audit(me))
        assert fake.n_audits == 1
        assert not fake.requests[0].audit


def test_marks() -> None:
    spans = [(span.start, span.end) for span in marked_text(FOUND).spans if span.style == MARK]
    assert spans == [(3, 7)]
    parts = Audited(text="aäb\x1b", flips=("", "", ""), starts=(1, 1, 3), ends=(2, 2, 4))
    marked = marked_text(parts)
    assert marked.plain == "aäb␛"
    assert [(s.start, s.end) for s in marked.spans if s.style == MARK] == [(1, 2), (3, 4)]
    assert marked_text(Audited(text="abc")).plain == "abc"


@pytest.mark.parametrize("command", ["/audit", "/audit auto", "/audit nonsense"])
async def test_before_there_is_an_answer(command: str) -> None:
    async with user(engine()) as me:
        await me.send(command)
        said = {
            "/audit": "has written no answer",
            "/audit auto": "when nothing else goes on",
            "/audit nonsense": "no such choice",
        }
        assert said[command] in me.notes


async def test_an_error_is_told() -> None:
    fake = engine(TEXT)
    fake.auditing = [LocalKVError("no memory")]
    async with user(fake) as me:
        await me.ask("Hi")
        await me.send("/audit")
        await me.until(lambda: "no audit: no memory" in me.notes)
        assert figures(me) == ""


@pytest.mark.slow
async def test_esc_and_a_new_message_end_it() -> None:
    fake = engine(TEXT, "Well.")
    fake.auditing = [Wait()]
    async with user(fake) as me:
        await me.ask("Hi")
        await me.send("/audit")
        await me.until(lambda: fake.auditing[0].reached.is_set())
        assert "comparing" in figures(me)
        await me.press("escape")
        await me.until(lambda: figures(me) == "")
        assert not shows_audit(me)
        fake.auditing = [Wait()]
        await me.send("/audit")
        await me.until(lambda: fake.auditing[0].reached.is_set())
        await me.ask("And?")
        assert me.texts[-1] == "Well."
        assert not shows_audit(me)


@pytest.mark.slow
async def test_answers_are_audited_when_nobody_presses_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_audit, "IDLE_SECONDS", 0.05)
    first = Wait()
    fake = engine(TEXT, "Well.")
    async with user(fake) as me:
        await me.send("/audit auto")
        fake.auditing = [first]
        await me.ask("Hi")
        assert fake.requests[0].audit
        await me.until(first.reached.is_set)
        fake.auditing = []
        await me.press("x")  # stops it; it begins anew
        await me.until(lambda: "1 of 5" in figures(me))
        assert fake.n_audits == 2
        assert not shows_audit(me)
        assert me.prompt.text == "x"
        me.prompt.clear()
        await me.send("/audit off")
        await me.ask("And?")
        assert figures(me) == ""
        assert not fake.requests[1].audit
        assert fake.n_audits == 2


async def test_an_answer_in_a_cache_with_a_budget_can_be_audited_later() -> None:
    fake = engine(TEXT)
    fake.facts = replace(FACTS, kv_budget=1 << 20, kv_ladder=("f16/f16", "q8_0/q8_0"))
    async with user(fake) as me:
        await me.ask("Hi")
        assert fake.requests[0].audit
        assert fake.n_audits == 0


async def test_an_answer_of_another_session_is_not_audited() -> None:
    async with user(engine(TEXT)) as me:
        await me.ask("Hi")
        await me.send("/audit")
        await me.until(lambda: shows_audit(me))
        await me.press("escape")
        assert "1 of 5" in figures(me)
        await me.send("/clear")
        assert figures(me) == ""
        await me.send("/audit")
        assert "has written no answer here" in me.notes


async def test_the_panel_on_a_small_screen() -> None:
    async with user(engine(TEXT), size=(60, 16)) as me:
        await me.ask("Hi")
        await me.send("/audit")
        await me.until(lambda: shows_audit(me))
        assert me.app.screen.query_one("#audit-text", Static).size.width <= 60
        me.screen_text()


async def test_a_text_that_degenerates_is_told() -> None:
    fake = engine("la la la", "Well.")
    fake.guesses = {"degenerate": "the same 1 token 40 times from token 1 on; try a larger type"}
    async with user(fake) as me:
        await me.ask("Hi")
        assert "the same 1 token 40 times" in figures(me)
        await me.send("/stats")
        assert "the same 1 token 40 times" in me.notes
        await me.send("/audit")
        await me.until(lambda: shows_audit(me))
        await me.press("escape")
        assert "1 of 5" in figures(me)
        assert "larger type" in figures(me).replace("\n", " ")
        fake.guesses = {}
        await me.ask("And?")
        assert figures(me) == ""
