"""What the engine's process takes from the front, and in which order."""

from __future__ import annotations

import asyncio
from collections import Counter
from threading import Event

import msgspec
import pytest

from localkv.chat.engine import EngineOptions
from localkv.engine_process.text_server import Inbox
from localkv.engine_process.texts import Again, SlotDone, Submit, to_engine
from localkv.engine_process.wire import LENGTH, Cancel, SlotAction, framed
from localkv.sampling.params import SamplingParams
from localkv.server.engine_client import TextClient, _with_less_said_again
from localkv.server.front import with_seed
from localkv.structured.grammar import Grammar


class SlowTokens:
    def __init__(self) -> None:
        self.goes_on = Event()
        self.begins = Event()
        self.held = Counter[str]()

    def has_matcher(self, grammar: Grammar) -> bool:
        return False

    def hold(self, grammar: Grammar) -> None:
        self.begins.set()
        assert self.goes_on.wait(10)
        self.held[grammar.source] += 1

    def release(self, grammar: Grammar) -> None:
        self.held[grammar.source] -= 1


def bound(id: int, client: str = "a") -> Submit:
    return Submit(id, [1], SamplingParams(), grammar=Grammar(f"start: /{id}/"), client=client)


def test_only_a_text_with_a_grammar_waits_for_its_matcher() -> None:
    inbox, tokens = Inbox(), SlowTokens()
    inbox.make_matchers(tokens)  # type: ignore[arg-type]
    free = Submit(2, [1], SamplingParams())
    for message in (bound(1), free, Cancel(2)):
        inbox.put(message)
    assert [inbox.messages.get(timeout=10) for _ in range(2)] == [free, Cancel(2)]
    tokens.goes_on.set()
    assert inbox.messages.get(timeout=10) == bound(1)
    inbox.put(Cancel(1))
    assert inbox.messages.get(timeout=10) == Cancel(1)
    assert tokens.held.total() == 1


def test_clients_have_their_matchers_made_in_turn() -> None:
    inbox, tokens = Inbox(), SlowTokens()
    inbox.make_matchers(tokens)  # type: ignore[arg-type]
    for id in range(10):
        inbox.put(bound(id, "a"))
    assert tokens.begins.wait(10)
    inbox.put(bound(10, "b"))
    tokens.goes_on.set()
    taken = [inbox.messages.get(timeout=10) for _ in range(11)]
    assert bound(10, "b") in taken[:3]
    assert [one for one in taken if one.client == "a"] == [bound(id) for id in range(10)]


def test_no_matcher_is_made_for_a_text_that_was_cancelled() -> None:
    inbox, tokens = Inbox(), SlowTokens()
    inbox.make_matchers(tokens)  # type: ignore[arg-type]
    inbox.put(bound(0))
    assert tokens.begins.wait(10)
    for id in range(1, 9):
        inbox.put(bound(id))
    for id in range(8):
        inbox.put(Cancel(id))
    assert [inbox.messages.get(timeout=10) for _ in range(8)] == [Cancel(id) for id in range(8)]
    tokens.goes_on.set()
    assert inbox.messages.get(timeout=10) == bound(8)
    assert +tokens.held == Counter([bound(8).grammar.source])


def test_what_texts_have_in_common_is_sent_once() -> None:
    one = msgspec.structs.replace(bound(1), ids=[5] * 1000, params=SamplingParams(seed=7))
    other = msgspec.structs.replace(one, id=4, max_tokens=3)
    texts = [one, with_seed(one, 1), with_seed(one, 2), other, with_seed(other, 1)]
    texts = [msgspec.structs.replace(text, id=id) for id, text in enumerate(texts)]
    sent, inbox = list(_with_less_said_again(texts)), Inbox()
    assert [type(message) for message in sent] == [Submit, Again, Again, Submit, Again]
    for message in sent:
        inbox.put(to_engine(framed(message)[LENGTH.size :]))
    assert [inbox.messages.get() for _ in texts] == texts


async def test_one_state_is_saved_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    client, sent = TextClient(EngineOptions("none.gguf")), list[SlotAction]()
    monkeypatch.setattr(client, "_send", sent.append)
    acting = [asyncio.create_task(client.act(SlotAction(0, "save", 0))) for _ in range(3)]
    for n_sent in (1, 2, 3):
        await asyncio.sleep(0.01)
        assert len(sent) == n_sent
        client._hand_on(SlotDone(sent[-1].id, 1, 1, 1.0))
    assert {done.n_tokens for done in await asyncio.gather(*acting)} == {1}
