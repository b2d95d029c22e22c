"""What users of one model may do by turns, at random, and what each should get."""

from __future__ import annotations

import random
from dataclasses import dataclass
from threading import Event
from typing import Any

import numpy as np

from localkv import LLM
from localkv.engine.stream import Completion, TextStream

PROMPTS = (
    "Once upon a time there was a fox",
    "Once upon a time there was a small owl",
    "Once upon",
    "The moon rose over the hills, and nobody was hungry.",
    "hello",
    "They walked along the river until the moon rose over the hills. " * 3,
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repeat_penalty": 1.3},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 2.0, "seed": 2, "top_k": 0, "min_p": 0.0},
    {"temperature": 1.3, "seed": 3, "xtc_probability": 0.5, "xtc_threshold": 0.01},
)
MOST_TOKENS = 24
MANY_STREAMS = 4


@dataclass(frozen=True)
class Wish:
    """A prompt and how it is continued."""

    prompt: int
    sampling: int
    max_tokens: int
    ignore_eos: bool

    def stream(self, llm: LLM, cancel: Event | None = None) -> TextStream:
        prompt: Any = PROMPTS[self.prompt]
        options = {**SAMPLING[self.sampling], "max_tokens": self.max_tokens}
        options |= {"ignore_eos": self.ignore_eos, "cancel": cancel}
        if self.prompt % 2:
            return llm.chat([{"role": "user", "content": prompt}], **options)
        return llm.stream(prompt, **options)


def any_wish(chance: random.Random) -> Wish:
    return Wish(
        chance.randrange(len(PROMPTS)),
        chance.randrange(len(SAMPLING)),
        chance.randint(0, MOST_TOKENS),
        chance.random() < 0.8,
    )


def outcome(completion: Completion) -> tuple[object, ...]:
    """What must not depend on others: not how many tokens were reused, nor the time it took."""
    return completion.text, completion.finish_reason, completion.usage.completion_tokens


class Alone:
    """What a model answers to whoever has it alone, and from an empty cache."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.outcomes: dict[Wish, tuple[object, ...]] = {}
        self.all_logits: dict[int, np.ndarray] = {}

    def outcome(self, wish: Wish) -> tuple[object, ...]:
        if wish not in self.outcomes:
            self.llm.engine.reset()
            self.outcomes[wish] = outcome(wish.stream(self.llm).completion)
        return self.outcomes[wish]

    def logits(self, prompt: int) -> np.ndarray:
        if prompt not in self.all_logits:
            self.all_logits[prompt] = self.llm.logits(self.llm.tokenize(PROMPTS[prompt]))
        return self.all_logits[prompt]


def take_turns(llm: LLM, alone: Alone, seed: int, n_steps: int) -> dict[str, int]:
    """Streams by turns with all else that uses the cache; how often what was done.

    Raises:
        AssertionError: somebody got something else than alone.
    """
    chance = random.Random(seed)
    live: list[tuple[Wish, TextStream]] = []
    done = dict.fromkeys(("piece", "stream", "completion", "logits", "forget", "left"), 0)
    for _ in range(n_steps):
        action = chance.choices(tuple(done), (12, 4, 2, 1, 1, 1))[0]
        done[action] += 1
        match action:
            case "piece" if live:
                next(chance.choice(live)[1], None)
            case "stream" if len(live) < MANY_STREAMS:
                wish = any_wish(chance)
                live.append((wish, wish.stream(llm)))
            case "completion":
                wish = any_wish(chance)
                assert outcome(wish.stream(llm).completion) == alone.outcome(wish), wish
            case "logits":
                prompt = chance.randrange(len(PROMPTS))
                got = llm.logits(llm.tokenize(PROMPTS[prompt]))
                assert np.array_equal(got, alone.logits(prompt)), prompt
            case "forget":
                llm.engine.truncate(chance.choice((0, 3, 20)))
            case "left" if live:
                _, stream = live.pop(chance.randrange(len(live)))
                if chance.random() < 0.5:
                    stream.close()
    for wish, stream in live:
        assert outcome(stream.completion) == alone.outcome(wish), wish
    done["finished"] = len(live)
    return done
