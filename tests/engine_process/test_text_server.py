"""How texts that become vectors share steps with texts that are written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from localkv.chat.engine import EngineOptions
from localkv.engine_process.text_server import TextServer
from localkv.engine_process.texts import Embed, Ended, Event, Piece, Step, Submit, Vectors
from localkv.engine_process.wire import Message
from localkv.sampling.params import SamplingParams
from support.server import SHIPPED_MODEL

GREEDY = SamplingParams(temperature=0.0)
LONG = [4 + i % 200 for i in range(1000)]


class Served:
    """A server in this process; each call of `step` returns its events."""

    def __init__(self, **arguments: int) -> None:
        self._sent = list[Message]()
        options = {"n_threads": 1, "n_parallel": 5, "n_ctx": 2048, "n_batch": 128, **arguments}
        self.server = TextServer(EngineOptions(str(SHIPPED_MODEL), options), self._sent.append)
        self.server.load()

    def ask(self, *messages: Submit | Embed) -> None:
        for message in messages:
            self.server.take(message)

    def step(self) -> list[Event]:
        self._sent.clear()
        self.server.serve_some()
        (step,) = self._sent
        assert isinstance(step, Step)
        return step.events

    def until(self, wanted: Callable[[Event], bool]) -> list[list[Event]]:
        steps = [self.step()]
        while not any(wanted(event) for event in steps[-1]):
            steps.append(self.step())
            assert len(steps) < 5000
        return steps


@pytest.fixture(scope="module")
def served() -> Served:
    return Served()


def texts(n: int, n_tokens: int = 60) -> list[Submit]:
    return [
        Submit(id, [1, 4 + id], GREEDY, max_tokens=n_tokens, ignore_eos=True) for id in range(n)
    ]


def is_vectors(id: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, Vectors) and event.id == id


def vector(steps: list[list[Event]], id: int) -> np.ndarray:
    (found,) = (event for step in steps for event in step if is_vectors(id)(event))
    assert isinstance(found, Vectors)
    return np.frombuffer(found.data, "<f4").reshape(-1, found.width)


def written(steps: list[list[Event]]) -> dict[int, str]:
    found = dict[int, str]()
    for event in (event for step in steps for event in step):
        if isinstance(event, Piece):
            found[event.id] = found.get(event.id, "") + event.text
    return found


def end_all(served: Served, n: int) -> list[list[Event]]:
    steps, n_ended = list[list[Event]](), 0
    while n_ended < n:
        steps.append(served.step())
        n_ended += sum(isinstance(event, Ended) for event in steps[-1])
    return steps


def test_a_query_comes_within_three_steps(served: Served) -> None:
    """Beside four texts, and while others have many and long texts embedded."""
    served.ask(*texts(4), Embed(10, [LONG, LONG[:600]]))
    before = [served.step() for _ in range(3)]
    served.ask(Embed(11, [LONG[:20]]))
    steps = served.until(is_vectors(11))
    assert len(steps) <= 3
    assert not any(is_vectors(10)(event) for step in before + steps for event in step)
    end_all(served, 4)


def test_all_are_as_they_are_alone(served: Served) -> None:
    served.ask(*texts(4))
    alone = written(end_all(served, 4))
    served.ask(Embed(10, [LONG]))
    want = vector(served.until(is_vectors(10)), 10)
    served.ask(*texts(4), Embed(11, [LONG]))
    steps = end_all(served, 4)
    assert written(steps) == alone
    np.testing.assert_array_equal(vector(steps, 11), want)
    at = next(i for i, step in enumerate(steps) for event in step if is_vectors(11)(event))
    assert at >= 7  # eight pieces
    for step in steps[2:at]:
        assert {event.id for event in step if isinstance(event, Piece)} == {0, 1, 2, 3}


def test_a_long_text_waits_for_room() -> None:
    """Texts that are written hold all pages, until the first ends."""
    served = Served(n_parallel=4, n_ctx=1024)
    served.ask(Embed(10, [LONG]))
    want = vector(served.until(is_vectors(10)), 10)
    prompts = [Submit(i, [5 + i] * 900, GREEDY, max_tokens=60, ignore_eos=True) for i in range(4)]
    served.ask(*prompts)
    served.until(lambda event: isinstance(event, Piece) and event.id == 3)
    served.ask(Embed(11, [LONG]))
    steps = served.until(is_vectors(11))
    np.testing.assert_array_equal(vector(steps, 11), want)
    ends = [i for i, step in enumerate(steps) if any(isinstance(event, Ended) for event in step)]
    assert ends
    assert 30 < ends[0] < len(steps)
