"""A model whose user interrupts it again and again, to be run as a program: it may crash.

Arguments: a model file, what ("instructions", "loads" or "signals"), seconds, a seed. What was done
is printed as JSON; what went wrong ends it with a traceback.
"""

from __future__ import annotations

import _thread
import faulthandler
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from localkv import LLM
from support.attack.interruptions import Interruption

PROMPT = "Once upon a time there was a fox"
OPTIONS = {"max_tokens": 4, "temperature": 1.0, "seed": 3, "ignore_eos": True}
PER_LINE = 8
"""Instructions in a line, at most."""


class User:
    """Knows what the model should say, and can look whether it still does."""

    def __init__(self, path: str) -> None:
        self.llm = LLM(path, n_ctx=256, n_threads=2)
        self.ids = self.llm.tokenize(PROMPT)
        self.text = self.llm.complete(PROMPT, **OPTIONS).text
        self.logits = self.llm.logits(self.ids)

    def complete(self) -> None:
        self.llm.complete(PROMPT, max_tokens=3, ignore_eos=True)

    def overtake(self) -> None:
        stream = self.llm.stream(PROMPT, **OPTIONS)
        next(stream)
        self.llm.complete("They walked", max_tokens=2)
        list(stream)

    def all_logits(self) -> None:
        self.llm.logits(self.ids)

    def forget(self) -> None:
        self.llm.engine.reset()

    def check(self) -> None:
        assert self.llm.complete(PROMPT, **OPTIONS).text == self.text
        assert np.array_equal(self.llm.logits(self.ids), self.logits)
        assert not self.llm.backend.turns._queue
        (pool,), (pages,) = self.llm.engine.cache.pools, self.llm.engine.sequence.pages
        assert sorted((*pool.free, *pages)) == list(range(pool.n_pages))


def elsewhere(call: Callable[[], None]) -> None:
    """In another thread, as far as it ends."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


def at_instructions(path: str, until: float, chance: random.Random) -> Counter[str]:
    """One call is interrupted somewhere, at times the next one, too; then all is well."""
    user, done = User(path), Counter[str]()
    calls = (user.complete, user.overtake, user.all_logits)
    lines = {}
    for call in calls:
        user.forget()
        counter = Interruption(event="line")
        counter.during(call)
        lines[call] = counter.count
    while time.monotonic() < until:
        call = chance.choice(calls)
        if chance.random() < 0.5:
            user.forget()
        for most in (lines[call], 200)[: chance.choice((1, 1, 2))]:
            event = chance.choice(("line", "opcode"))
            number = chance.randint(1, most if event == "line" else most * PER_LINE)
            interruption = Interruption(number, event)
            done["interrupted"] += interruption.during(call)
        try:
            elsewhere(user.check) if chance.random() < 0.2 else user.check()
        except Exception as error:
            raise AssertionError(f"after {interruption.where}") from error
        done["checked"] += 1
    return done


def while_it_loads(path: str, until: float, chance: random.Random) -> Counter[str]:
    """A load that is interrupted leaves nothing that the next one stumbles over."""
    user, done = User(path), Counter[str]()
    counter = Interruption(event="line")
    counter.during(lambda: LLM(path, n_ctx=64))
    while time.monotonic() < until:
        interruption = Interruption(chance.randint(1, counter.count), "line")
        done["interrupted"] += interruption.during(lambda: LLM(path, n_ctx=64))
        user.check()
        assert LLM(path, n_ctx=256, n_threads=2).complete(PROMPT, **OPTIONS).text == user.text
        done["checked"] += 1
    return done


def by_signals(path: str, until: float, chance: random.Random) -> Counter[str]:
    """Ctrl-C at any time in the main thread, while another thread uses the model, too."""
    user, done = User(path), Counter[str]()
    calls = (user.complete, user.overtake, user.all_logits)
    finished, errors = threading.Event(), list[BaseException]()

    def other() -> None:
        try:
            while not finished.is_set():
                assert user.llm.complete(PROMPT, **OPTIONS).text == user.text
                done["elsewhere"] += 1
                time.sleep(0.01)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        while time.monotonic() < until:
            timer = threading.Timer(chance.random() / 20, _thread.interrupt_main)
            try:
                timer.start()
                began = time.monotonic()
                # Python drops an exception in a callback of a weak reference
                while timer.is_alive() or time.monotonic() - began < 1:
                    chance.choice(calls)()
            except KeyboardInterrupt:
                done["interrupted"] += 1
            timer.join()
            assert user.llm.complete(PROMPT, **OPTIONS).text == user.text
            done["checked"] += 1
    finally:
        finished.set()
        thread.join(60)
    if errors:
        raise errors[0]
    assert not thread.is_alive(), "it hangs"
    user.check()
    return done


def main(path: str, what: str, seconds: str, seed: str) -> None:
    faulthandler.dump_traceback_later(100 + 2 * float(seconds), exit=True)
    kinds = {"instructions": at_instructions, "loads": while_it_loads, "signals": by_signals}
    done = kinds[what](path, time.monotonic() + float(seconds), random.Random(int(seed)))
    print(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
