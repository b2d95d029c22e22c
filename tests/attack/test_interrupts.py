"""Ctrl-C and other exceptions at any instruction, event loops, forks: then the model is well."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from localkv import LLM
from support.attack.attack_script import run_script
from support.attack.interruptions import Interruption

# seconds: in ordinary runs, and by `make attack`
SHORT, LONG = 3, 60

PROMPT = "Once upon a time there was a fox"


@pytest.fixture
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, n_ctx=128)


def sentence(llm: LLM, seed: int = 1) -> str:
    options = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    return llm.complete(PROMPT, seed=seed, **options).text


# -- at any instruction


@pytest.mark.slow
@pytest.mark.parametrize("what", ["instructions", "signals", "loads"])
def test_an_interrupted_model_is_well(tiny_model: Path, what: str) -> None:
    counts = run_script("interrupted.py", tiny_model, what, SHORT, 1, seconds=SHORT)
    assert counts["interrupted"] > SHORT
    assert counts["checked"] > SHORT


@pytest.mark.attack
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("what", ["instructions", "signals", "loads"])
def test_a_model_that_is_often_interrupted_is_well(tiny_model: Path, what: str, seed: int) -> None:
    counts = run_script("interrupted.py", tiny_model, what, LONG, seed, seconds=LONG)
    assert counts["interrupted"] > LONG
    assert counts["checked"] > LONG


def test_an_interrupted_stream_has_ended(llm: LLM) -> None:
    """Its text so far remains; what comes after is another stream's."""
    wanted = sentence(llm)
    stream = llm.stream(PROMPT, max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
    begun = next(stream)
    assert Interruption(2000).during(lambda: list(stream))
    completion = stream.completion
    assert completion.finish_reason == "cancelled"
    assert completion.text.startswith(begun)
    assert wanted.startswith(completion.text)
    assert list(stream) == []
    assert sentence(llm) == wanted


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_an_exception_that_is_kept_holds_no_pages(
    tiny_model: Path, n_parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its traceback has a sequence in a frame: a copy that was just made and holds all pages."""
    llm = LLM(tiny_model, n_ctx=256, n_parallel=n_parallel)
    wanted = sentence(llm)
    kept = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.cache.states, "copy", interrupt)
            with pytest.raises(KeyboardInterrupt) as raised:
                llm.complete("Once upon a time", max_tokens=2)
            kept.append(raised.value)
        assert sentence(llm) == wanted
    assert len(kept) == 3


@pytest.mark.slow
def test_a_stream_that_is_left_holds_nothing(llm: LLM) -> None:
    """Closed, forgotten, or collected by another thread."""
    wanted = sentence(llm)
    for leave in ("close", "forget", "collect elsewhere"):
        stream = llm.stream(PROMPT, ignore_eos=True, seed=2)
        begun = next(stream)
        if leave == "close":
            stream.close()
            assert list(stream) == []
            assert stream.completion.text == begun
            assert stream.completion.finish_reason == "cancelled"
        ring = [stream]
        ring.append(ring)  # type: ignore[arg-type]
        del stream, ring
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
        assert sentence(llm) == wanted


def test_closing_a_stream_at_its_end_changes_nothing(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=3, ignore_eos=True)
    before = stream.completion
    stream.close()
    assert stream.completion == before
    assert before.finish_reason == "length"


def test_exceptions_from_what_users_give(llm: LLM, tiny_model: Path) -> None:
    """They reach the user as they are, and the model is well."""
    wanted = sentence(llm)

    class Broken(Event):
        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            if self.looks > 3:
                raise ZeroDivisionError("mine")
            return False

    with pytest.raises(ZeroDivisionError, match="mine"):
        llm.complete(PROMPT, cancel=Broken(), ignore_eos=True)
    assert sentence(llm) == wanted

    def progress(stage: str, done: int, total: int) -> None:
        raise ZeroDivisionError(stage)

    with pytest.raises(ZeroDivisionError, match="weights"):
        LLM(tiny_model, on_progress=progress)
    with pytest.raises(ZeroDivisionError, match="kernels"):
        LLM(tiny_model, on_progress=lambda *what: what[0] == "kernels" and progress(*what))
    assert sentence(LLM(tiny_model, n_ctx=128)) == wanted


# -- event loops


async def test_tasks_in_threads(llm: LLM) -> None:
    """The loop goes on meanwhile; each task gets its own text."""
    wanted = [sentence(llm, seed) for seed in range(6)]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as pool:
        tasks = [asyncio.to_thread(sentence, llm, seed) for seed in range(3)]
        tasks += [loop.run_in_executor(pool, sentence, llm, seed) for seed in range(3, 6)]
        assert await asyncio.gather(*tasks) == wanted
    ticking.cancel()
    assert ticks > 0


async def test_a_task_that_is_cancelled(llm: LLM) -> None:
    """Its thread goes on until `cancel` is set; others get their turns all the while."""
    wanted = sentence(llm)
    cancel, reasons = Event(), list[str]()

    def endless() -> None:
        while not reasons or reasons[-1] == "length":
            options = {"ignore_eos": True, "cancel": cancel}
            reasons.append(llm.complete(PROMPT, **options).finish_reason)

    task = asyncio.create_task(asyncio.to_thread(endless))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(asyncio.to_thread(sentence, llm), 60) == wanted
    assert "cancelled" not in reasons
    cancel.set()
    deadline = time.monotonic() + 60
    while "cancelled" not in reasons and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert reasons[-1] == "cancelled"
    assert sentence(llm) == wanted


async def test_pieces_in_an_event_loop(llm: LLM) -> None:
    """Two streams, a piece at a time, each piece from whatever thread is free."""
    wanted = [sentence(llm, seed) for seed in (1, 2)]

    async def read(seed: int) -> str:
        options = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True, "seed": seed}
        stream, text = llm.stream(PROMPT, **options), ""
        while piece := await asyncio.to_thread(next, stream, ""):
            text += piece
        return text

    assert await asyncio.gather(read(1), read(2)) == wanted


# -- forks


@pytest.mark.slow
def test_forks(tiny_model: Path) -> None:
    """Neither hangs: one that was made before the model works, later ones are told."""
    assert run_script("forked.py", tiny_model, seconds=60) == {"refused": 3, "worked": 3}
