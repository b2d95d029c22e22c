"""Threads that use one model as they like, to be run as a program: crashes end it, not the tests.

Arguments: a model file, types of K and V, seconds, a seed. What was done is printed as
JSON; what went wrong ends it with a traceback.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

from localkv import LLM
from support.attack.interleavings import MOST_TOKENS, PROMPTS, SAMPLING, Alone, Wish, outcome

MANY_THREADS = 6
MANY_WISHES = 24


class Visitor:
    """A thread that asks for this and that, and compares what it gets with what it should."""

    def __init__(self, llm: LLM, answers: Answers, until: float, seed: int) -> None:
        self.llm, self.answers, self.until = llm, answers, until
        self.chance = random.Random(seed)
        self.done = Counter[str]()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            while time.monotonic() < self.until:
                action = self.chance.choice(("complete", "stream", "logits", "cancel", "leave"))
                getattr(self, f"_{action}")()
                self.done[action] += 1
        except BaseException as error:
            self.error = error

    def _wish(self) -> Wish:
        return self.chance.choice(tuple(self.answers.outcomes))

    def _complete(self) -> None:
        wish = self._wish()
        assert outcome(wish.stream(self.llm).completion) == self.answers.outcomes[wish], wish

    def _stream(self) -> None:
        """Two at the same time, with pauses."""
        wishes = self._wish(), self._wish()
        streams = [wish.stream(self.llm) for wish in wishes]
        unread = list(streams)
        while unread:
            time.sleep(self.chance.choice((0, 0, 0.002)))
            unread = [stream for stream in unread if next(stream, None)]
        for wish, stream in zip(wishes, streams, strict=True):
            assert outcome(stream.completion) == self.answers.outcomes[wish], wish

    def _logits(self) -> None:
        prompt = self.chance.randrange(len(PROMPTS))
        got = self.llm.logits(self.llm.tokenize(PROMPTS[prompt]))
        assert np.array_equal(got, self.answers.logits[prompt]), prompt

    def _cancel(self) -> None:
        wish, cancel = self._wish(), threading.Event()
        timer = threading.Timer(self.chance.random() / 20, cancel.set)
        timer.start()
        completion = wish.stream(self.llm, cancel).completion
        whole, reason, _ = self.answers.outcomes[wish]
        assert completion.finish_reason in ("cancelled", reason)
        assert str(whole).startswith(completion.text.rstrip("\ufffd")), wish
        timer.join()

    def _leave(self) -> None:
        stream = self._wish().stream(self.llm)
        for _ in range(self.chance.randrange(4)):
            next(stream, None)
        del stream
        if self.chance.random() < 0.1:
            gc.collect()


class Answers:
    """What a model says to whoever has it alone."""

    def __init__(self, llm: LLM, chance: random.Random) -> None:
        alone = Alone(llm)
        self.outcomes = {}
        for _ in range(MANY_WISHES):
            wish = Wish(
                chance.randrange(len(PROMPTS)),
                chance.randrange(len(SAMPLING)),
                chance.randint(1, MOST_TOKENS),
                chance.random() < 0.8,
            )
            self.outcomes[wish] = alone.outcome(wish)
        self.logits = [alone.logits(prompt) for prompt in range(len(PROMPTS))]


def main(path: str, type_k: str, type_v: str, seconds: str, seed: str) -> None:
    faulthandler.dump_traceback_later(60 + 2 * float(seconds), exit=True)
    options: dict[str, Any] = {"cache_type_k": type_k, "cache_type_v": type_v}
    models = [LLM(path, n_ctx=256, n_threads=2, **options), LLM(path, n_ctx=200, **options)]
    chance = random.Random(int(seed))
    answers = [Answers(llm, chance) for llm in models]
    until = time.monotonic() + float(seconds)
    visitors = [
        Visitor(models[i % 3 == 2], answers[i % 3 == 2], until, chance.getrandbits(32))
        for i in range(MANY_THREADS)
    ]
    done = Counter[str]()
    for visitor in visitors:
        visitor.thread.join()
        if visitor.error is not None:
            raise visitor.error
        done += visitor.done
    assert len(done) == 5, done
    print(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
