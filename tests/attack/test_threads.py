"""One model, many users: streams by turns, threads, and those who leave half-way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from localkv import LLM, LocalKVError
from localkv.system.threads import chosen_threads, n_threads, use_threads
from localkv.system.turns import LOOK_SECONDS, CancelledWaitError, Turns
from support.attack.attack_script import run_script
from support.attack.interleavings import Alone, take_turns
from support.cache_types import PAIRS
from support.waiting import wait_for

# how much is tried: the first number in ordinary runs, the second by `make attack`
PROGRAMMES, MANY_PROGRAMMES = 4, 150
STEPS, MANY_STEPS = 25, 60
CROWD_SECONDS, MANY_CROWD_SECONDS = 3, 60

TYPES = (("f16", "f16"), ("q8_0", "q4_0"))


def run_crowd(model: Path, types: tuple[str, str], seconds: int, seed: int) -> None:
    counts = run_script("crowd.py", model, *types, seconds, seed, seconds=seconds)
    assert sum(counts.values()) >= seconds, counts


# -- streams by turns


@pytest.mark.slow
@pytest.mark.parametrize("types", TYPES, ids="/".join)
def test_streams_that_take_turns_say_what_they_say_alone(
    tiny_model: Path, types: tuple[str, str]
) -> None:
    llm = LLM(tiny_model, cache_type_k=types[0], cache_type_v=types[1])
    alone, finished = Alone(llm), 0
    for seed in range(PROGRAMMES):
        finished += take_turns(llm, alone, seed, STEPS)["finished"]
    assert finished >= PROGRAMMES


@pytest.mark.attack
@pytest.mark.parametrize("types", [*TYPES, *PAIRS], ids="/".join)
def test_many_streams_that_take_turns(tiny_model: Path, types: tuple[str, str]) -> None:
    llm = LLM(tiny_model, cache_type_k=types[0], cache_type_v=types[1])
    alone, finished = Alone(llm), 0
    for seed in range(1000, 1000 + MANY_PROGRAMMES):
        finished += take_turns(llm, alone, seed, MANY_STEPS)["finished"]
    assert finished >= MANY_PROGRAMMES


@pytest.mark.attack
def test_streams_of_the_reference_take_turns(tiny_model: Path) -> None:
    """It is slow; few of them will do."""
    llm = LLM(tiny_model, device="reference", cache_type_k="q8_0")
    assert take_turns(llm, Alone(llm), 1, STEPS)["finished"]


def test_an_overtaken_stream_goes_on(tiny_model: Path) -> None:
    """Greedily and by chance; the other completion is right, too."""
    llm = LLM(tiny_model, n_ctx=200)
    for options in ({"temperature": 0}, {"temperature": 1.5, "seed": 5}):
        options |= {"max_tokens": 30, "ignore_eos": True}
        wanted = [llm.complete(text, **options).text for text in ("The fox", "They walked")]
        stream = llm.stream("The fox", **options)
        begun = "".join(next(stream) for _ in range(5))
        assert llm.complete("They walked", **options).text == wanted[1]
        assert begun + "".join(stream) == wanted[0] == stream.completion.text


# -- threads


@pytest.mark.slow
@pytest.mark.parametrize("types", TYPES[1:], ids="/".join)
def test_a_crowd(tiny_model: Path, types: tuple[str, str]) -> None:
    run_crowd(tiny_model, types, CROWD_SECONDS, 1)


@pytest.mark.attack
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("types", TYPES, ids="/".join)
def test_large_crowds(tiny_model: Path, types: tuple[str, str], seed: int) -> None:
    run_crowd(tiny_model, types, MANY_CROWD_SECONDS, seed)


def test_models_work_at_the_same_time(tiny_model: Path) -> None:
    """One that waits for nobody does not wait for another model's turn."""
    first, second = LLM(tiny_model, n_ctx=64), LLM(tiny_model, n_ctx=64)
    begun, finish = Event(), Event()

    def hold() -> None:
        begun.set()
        assert finish.wait(60)

    holder = threading.Thread(target=first.engine.slot.turn, args=(hold,))
    holder.start()
    assert begun.wait(60)
    assert second.complete("The fox", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
    assert holder.is_alive()
    finish.set()
    holder.join()


def test_models_are_loaded_at_the_same_time(tiny_model: Path) -> None:
    """Threads that start together load models of several sizes; each says what it says alone."""
    options = {"max_tokens": 8, "temperature": 0.0}
    wanted = LLM(tiny_model, n_ctx=64).complete("The fox", **options).text
    start, texts = threading.Barrier(4), list[str]()

    def load(n_ctx: int) -> None:
        start.wait(60)
        texts.append(LLM(tiny_model, n_ctx=n_ctx).complete("The fox", **options).text)

    threads = [threading.Thread(target=load, args=(64 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [wanted] * 4


@pytest.mark.attack
def test_models_are_loaded_at_the_same_time_with_no_kernel_compiled(
    tiny_model: Path, tmp_path: Path
) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    assert run_script("loads.py", tiny_model, seconds=300, env=env) == {"loaded": 4}
    kernels = list((tmp_path / "localkv" / "kernels").iterdir())
    assert len(kernels) > 5
    assert not [path for path in kernels if path.suffix == ".tmp"]


def test_a_model_brings_its_number_of_threads_along(tiny_model: Path) -> None:
    """torch has one number for each thread, and one model would change that of the other."""
    seen = dict[str, int]()
    one, two = LLM(tiny_model, n_ctx=64, n_threads=1), LLM(tiny_model, n_ctx=64, n_threads=2)

    def look(name: str, llm: LLM) -> None:
        llm.engine.slot.turn(lambda: seen.update({name: n_threads()}))

    before = n_threads()
    try:
        for name, llm in (("one", one), ("two", two), ("one again", one)):
            look(name, llm)
        thread = threading.Thread(target=look, args=("elsewhere", two))
        thread.start()
        thread.join()
    finally:
        use_threads(before)
    assert seen == {"one": 1, "two": 2, "one again": 1, "elsewhere": 2}


def test_prompts_have_their_own_number_of_threads(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = chosen_threads()
    llm, seen = LLM(tiny_model, n_ctx=64, n_threads=1, n_threads_batch=3), set[tuple[int, int]]()
    model = llm.engine.model

    def look(what: Callable[..., Any], batch: Any, cache: Any) -> Any:
        seen.add((len(batch.token_ids), n_threads()))
        return what(batch, cache)

    for name in ("hidden", "forward"):
        monkeypatch.setattr(model, name, partial(look, getattr(model, name)))
    try:
        llm.complete("The fox ran", max_tokens=3, temperature=0, ignore_eos=True)
        llm.embed("The fox ran")
    finally:
        use_threads(before.one, before.several)
    assert {(n > 1, threads) for n, threads in seen} == {(True, 3), (False, 1)}


def test_two_threads_may_read_one_stream(tiny_model: Path) -> None:
    llm = LLM(tiny_model)
    options = {"max_tokens": 60, "temperature": 1.0, "seed": 9, "ignore_eos": True}
    wanted = llm.complete("The fox", **options)
    stream = llm.stream("The fox", **options)
    parts: list[list[str]] = [[], []]
    threads = [threading.Thread(target=part.extend, args=(stream,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stream.completion.text == wanted.text
    assert sum(map(len, parts)) == len(list(llm.stream("The fox", **options)))


# -- whose turn it is


def waiting(turns: Turns, n: int) -> None:
    """Return when that many are at work or wait."""
    wait_for(lambda: len(turns._queue) >= n)


def test_first_come_first_served() -> None:
    turns, order, finish = Turns(), list[int](), Event()
    threads = [threading.Thread(target=turns.run, args=(lambda: finish.wait(60),))]
    threads[0].start()
    for i in range(20):
        waiting(turns, i + 1)
        thread = threading.Thread(target=turns.run, args=(lambda i=i: order.append(i),))
        thread.start()
        threads.append(thread)
    waiting(turns, 21)
    finish.set()
    for thread in threads:
        thread.join()
    assert order == list(range(20))
    assert not turns._queue


def test_who_waits_can_be_cancelled(tiny_model: Path) -> None:
    llm = LLM(tiny_model, n_ctx=64)
    finish, cancel, results = Event(), Event(), []
    turns = llm.backend.turns
    holder = threading.Thread(target=turns.run, args=(lambda: finish.wait(60),))
    holder.start()
    waiting(turns, 1)
    waiter = threading.Thread(target=lambda: results.append(llm.complete("The fox", cancel=cancel)))
    waiter.start()
    waiting(turns, 2)
    started = time.monotonic()
    cancel.set()
    waiter.join()
    assert time.monotonic() - started < 100 * LOOK_SECONDS
    assert results[0].finish_reason == "cancelled"
    assert holder.is_alive()
    with pytest.raises(CancelledWaitError):
        turns.run(lambda: None, cancel)
    finish.set()
    holder.join()


def test_who_would_wait_for_itself_is_told(tiny_model: Path) -> None:
    llm = LLM(tiny_model, n_ctx=64)
    text = llm.complete("The fox", max_tokens=5, temperature=0).text

    class Nosy(Event):
        """Uses the model where it is asked whether to go on, as a signal handler might."""

        def is_set(self) -> bool:
            llm.complete("The fox")
            return False

    with pytest.raises(LocalKVError, match=r"at work in this thread already .*signal handler"):
        llm.complete("The fox", cancel=Nosy())
    assert llm.complete("The fox", max_tokens=5, temperature=0).text == text


@pytest.mark.parametrize("same_thread", [True, False])
def test_a_turn_whose_holder_has_gone_is_over(same_thread: bool) -> None:
    """Ctrl-C came between two instructions of the queue's own."""
    turns = Turns()

    def leave_it() -> None:
        turns._leave = lambda ticket: None  # type: ignore[method-assign]
        turns.run(lambda: None)
        del turns._leave

    if same_thread:
        leave_it()
    else:
        thread = threading.Thread(target=leave_it)
        thread.start()
        thread.join()
    assert len(turns._queue) == 1
    assert turns.run(lambda: 7) == 7
    assert not turns._queue
