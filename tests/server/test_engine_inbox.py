"""What the engine's process takes from the front, and in which order."""

from __future__ import annotations

from threading import Event

from localkv.sampling.params import SamplingParams
from localkv.server.engine_child import Inbox
from localkv.server.wire import Cancel, Submit
from localkv.structured.grammar import Grammar


class SlowTokens:
    def __init__(self) -> None:
        self.goes_on = Event()

    def has_matcher(self, grammar: Grammar) -> bool:
        return False

    def matcher(self, grammar: Grammar) -> None:
        assert self.goes_on.wait(10)


def test_only_a_text_with_a_grammar_waits_for_its_matcher() -> None:
    inbox, tokens = Inbox(), SlowTokens()
    inbox.make_matchers(tokens)  # type: ignore[arg-type]
    bound = Submit(1, [1], SamplingParams(), grammar=Grammar("start: /a/"))
    free = Submit(2, [1], SamplingParams())
    for message in (bound, Cancel(1), free, Cancel(2)):
        inbox.put(message)
    assert [inbox.messages.get(timeout=10) for _ in range(2)] == [free, Cancel(2)]
    tokens.goes_on.set()
    assert [inbox.messages.get(timeout=10) for _ in range(2)] == [bound, Cancel(1)]
