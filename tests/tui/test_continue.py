"""Going on with answers that were cut, and answers to messages that have none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from textual.widgets import Static

from localkv.chat.engine import EngineOptions
from localkv.chat.session import ChatSession
from localkv.chat.store import SessionCache, Store
from localkv.errors import DoesNotFitError, ModelFileError
from localkv.sampling.params import SamplingParams
from localkv.tui.dialogs import ChoiceScreen
from support.chat_pilot import FakeModels, User, user, words
from support.fake_engine import FACTS, FakeEngine, Wait

pytestmark = pytest.mark.slow

FULL = replace(FACTS, n_ctx=16)
LONG = "one two three four five six"


def choices(me: User) -> list[str]:
    return [name for name, *_ in me.app.screen.choices]


async def choose(me: User, answer: str) -> None:
    await me.until(lambda: isinstance(me.app.screen, ChoiceScreen))
    options = me.app.screen.query_one("OptionList")
    options.highlighted = options.get_option_index(answer)
    await me.press("enter")


@pytest.mark.parametrize("how", ["ctrl+g", "/continue", "on it"])
async def test_an_answer_that_was_stopped_goes_on(how: str) -> None:
    pause = Wait()
    engine = FakeEngine(["Once", " upon", pause], [" a", " time."])
    async with user(engine) as me:
        await me.send("A story")
        await me.until(lambda: me.texts[-1] == "Once upon")
        await me.press("escape")
        await me.ready()
        if how == "/continue":
            await me.send(how)
        elif how == "ctrl+g":
            await me.press(how)
        else:
            await me.press("alt+up", "g")
        await me.until(lambda: me.texts == ["A story", "Once upon a time."])
        await me.ready()
        request = engine.requests[1]
        assert request.continued == "Once upon"
        assert [dict(m) for m in request.messages] == [{"role": "user", "content": "A story"}]
        assert me.markdown() == "Once upon a time."
        figures = str(me.chat.query(".figures").last(Static).render())
        assert figures.startswith("4 tokens · 50.0 tokens/s")
        assert me.path[-1].finish_reason == "stop"


async def test_an_answer_that_is_complete_does_not() -> None:
    async with user(FakeEngine(["Done."])) as me:
        await me.ask("Hi")
        assert not any(key.action == "continue" for key in me.chat.query("FooterKey"))
        await me.send("/continue")
        await me.until(lambda: "no answer at the end that was cut" in me.notes)
        assert len(me.engine.requests) == 1


async def test_a_full_context_is_made_larger_and_the_answer_goes_on() -> None:
    small = FakeEngine(words("It goes on"), facts=FULL, context_full=True)
    large = FakeEngine([" and ends."], facts=replace(FACTS, n_ctx=32))
    async with user(small, large) as me:
        await me.send("Go")
        await choose(me, "larger")
        await me.until(lambda: me.texts == ["Go", "It goes on and ends."])
        assert large.requests[0].continued == "It goes on"
        wanted = me.asked_for[1].arguments
        assert (wanted["n_ctx"], wanted["n_threads"]) == (32, 3)
        assert (wanted["cache_type_k"], wanted["cache_type_v"]) != ("f16", "f16")
        assert small.closed


async def test_turns_are_dropped_and_the_answer_goes_on() -> None:
    engine = FakeEngine(["Short."], words("It goes on"), [" and ends."], facts=FULL)
    async with user(engine) as me:
        await me.ask(LONG)
        engine.context_full = True
        await me.send("Go")
        await me.until(lambda: isinstance(me.app.screen, ChoiceScreen))
        engine.context_full = False
        await choose(me, "drop")
        await me.until(lambda: me.texts[-1] == "It goes on and ends.")
        assert [m["content"] for m in engine.requests[-1].messages] == ["Go"]


async def test_a_message_goes_along_into_a_new_chat(store: Store) -> None:
    engine = FakeEngine(["Short."], ["Here."], facts=FULL)
    async with user(engine, store=store) as me:
        await me.ask(LONG)
        await me.send("a b c d e")
        await choose(me, "new")
        await me.until(lambda: me.texts == ["a b c d e", "Here."])
        await me.ready()
        titles = {s.title: s.id for s in store.sessions()}
        assert set(titles) == {"a b c d e", LONG}
        old = store.session(titles[LONG]).conversation.path()
        assert [message.content for message in old] == [LONG, "Short."]


async def test_what_waits_goes_along_too() -> None:
    pause = Wait()
    engine = FakeEngine([pause, "Short."], ["Here."], ["There."], facts=FULL)
    async with user(engine) as me:
        await me.send(LONG)
        await me.until(pause.reached.is_set)
        await me.send("a b c d e")
        await me.send("f")
        pause.over.set()
        await choose(me, "new")
        await me.until(lambda: me.texts == ["a b c d e", "Here.", "f", "There."])


async def test_only_choices_that_can_work_are_offered() -> None:
    async with user(FakeEngine(["Short."], facts=FULL)) as me:
        await me.send(LONG * 3)  # the first message: nothing to drop, and no better in a new chat
        await me.until(lambda: isinstance(me.app.screen, ChoiceScreen))
        assert choices(me) == ["larger"]
    longest = replace(FULL, n_ctx_train=16)
    async with user(FakeEngine(["Short."], facts=longest)) as me:
        await me.ask(LONG)
        await me.send("a b c d e")
        await me.until(lambda: isinstance(me.app.screen, ChoiceScreen))
        assert choices(me) == ["drop", "new"]
    async with user(FakeEngine(facts=longest)) as me:
        await me.send(LONG * 3)
        await me.until(lambda: "the message alone takes 18 of 16 tokens" in me.notes)
        assert me.app.screen is me.chat


async def test_a_larger_context_without_memory_is_not_offered() -> None:
    models = FakeModels(errors={"tiny.gguf": DoesNotFitError("too large")})
    async with user(FakeEngine(["Short."], facts=FULL), models=models) as me:
        await me.ask(LONG)
        await me.send("a b c d e")
        await me.until(lambda: isinstance(me.app.screen, ChoiceScreen))
        assert choices(me) == ["drop", "new"]
        assert models.checked[0].arguments["n_ctx"] == 32


async def test_the_larger_context_is_large_enough() -> None:
    large = FakeEngine(["Room."], facts=replace(FACTS, n_ctx=64))
    async with user(FakeEngine(facts=FULL), large) as me:
        await me.send("word " * 40)
        await choose(me, "larger")
        await me.until(lambda: me.texts[-1] == "Room.")
        assert me.asked_for[1].arguments["n_ctx"] == 64


async def test_a_session_remembers_the_context_that_it_grew_to(store: Store) -> None:
    grown = replace(FACTS, n_ctx=64, type_k="q8_0", type_v="q4_0")
    async with user(
        FakeEngine(["Short."], facts=FULL), FakeEngine(["Room."], facts=grown), store=store
    ) as me:
        await me.ask(LONG)
        assert me.chat.session.cache == SessionCache(16, "q4_0", "q8_0", "tiny.gguf")
        await me.send("word " * 10)
        await choose(me, "larger")
        await me.until(lambda: me.texts[-1] == "Room.")
        await me.ready()
    (session,) = store.sessions()
    async with user(FakeEngine(["Yes."], facts=FULL), store=store, session_id=session.id) as me:
        assert me.chat.session.cache == SessionCache(64, "q8_0", "q4_0", "tiny.gguf")
        me.chat.session.conversation.leaf_id = None
        await me.ask("Hm")  # with the small one, which is no reason to forget the other
        assert me.chat.session.cache.n_ctx == 64
        assert me.chat.session.new().cache == SessionCache()
        assert not any("cache" in said for said in me.chat.session.new().carried_over())


async def test_without_memory_for_the_context_that_it_grew_to_it_has_the_usual_one() -> None:
    large = FakeEngine(loading=[DoesNotFitError("K and V take 9 GiB, but 2 GiB is available")])
    usual = EngineOptions("tiny.gguf", {"n_threads": 2})
    async with user(large, FakeEngine(["Here."]), otherwise=usual) as me:
        assert "K and V take 9 GiB, but 2 GiB is available; back to the usual context" in me.notes
        assert me.asked_for[1] == usual
        await me.ask("Are you there?")
        assert me.texts[-1] == "Here."
    broken = [FakeEngine(loading=[ModelFileError("no tensors")]) for _ in range(2)]
    async with user(*broken, otherwise=usual, wait=False) as me:
        await me.until(lambda: "no tensors" in me.rendered("#load-strip"))
        assert len(me.engines) == 2


async def test_a_resumed_message_without_an_answer_offers_one(store: Store) -> None:
    session = ChatSession(store, model="m.gguf", params=SamplingParams())
    session.say("Anybody?")
    async with user(FakeEngine(["Me."]), store=store, session_id=session.id) as me:
        assert "Ctrl+R has it answered" in me.notes
        await me.press("ctrl+r")
        await me.until(lambda: me.texts == ["Anybody?", "Me."])
        assert "Ctrl+R" not in me.notes
        await me.press("ctrl+n")
        await me.send(f"/load {session.title}")
        await me.until(lambda: me.texts == ["Anybody?", "Me."])
        assert "Ctrl+R" not in me.notes
