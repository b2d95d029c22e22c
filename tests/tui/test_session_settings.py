"""Settings that a user changes while talking: where they hold, and that it is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localkv.chat.store import Store
from support.chat_pilot import user
from support.fake_engine import FACTS, FakeEngine

pytestmark = pytest.mark.slow


async def test_prefill_and_think_reach_the_engine(store: Store) -> None:
    facts = replace(FACTS, has_think_switch=True)
    engine = FakeEngine(["Aye."], ["Arr."], facts=facts)
    async with user(engine, store=store) as me:
        await me.send("/think off")
        await me.until(lambda: "thinking: off, from the next answer on" in me.notes)
        await me.send("/prefill Aye,")
        await me.until(lambda: "answers begin with: Aye," in me.notes)
        await me.ask("Ready?")
        assert (engine.requests[0].think, engine.requests[0].prefill) == (False, "Aye,")
        session_id = me.chat.session.id
    engine = FakeEngine(["Aye."], ["Arr."], facts=facts)
    async with user(engine, store=store, session_id=session_id) as me:
        await me.ask("Again?")
        assert (engine.requests[0].think, engine.requests[0].prefill) == (False, "Aye,")
        await me.send("/prefill none")
        await me.send("/think auto")
        await me.ask("Again?")
        assert (engine.requests[1].think, engine.requests[1].prefill) == (None, "")


async def test_a_model_without_a_switch_says_so() -> None:
    async with user(FakeEngine()) as me:
        await me.send("/think on")
        await me.until(lambda: "no switch for it" in me.notes)
        await me.send("/think maybe")
        await me.until(lambda: "use on, off, auto" in me.notes)


async def test_what_carries_over_is_said(store: Store) -> None:
    async with user(FakeEngine(["Hi."]), store=store) as me:
        await me.send("/set temp 0.3")
        await me.until(lambda: "from the next answer on, here and in new chats" in me.notes)
        await me.send("/system Be brief")
        await me.ask("Hello")
        await me.press("ctrl+n")
        await me.until(lambda: me.texts == [])
        assert "as before: temperature 0.3, the system prompt" in me.rendered("#welcome")
