"""Long-range recall: a sentence that is planted far back in a text, and asked for at its end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.logprobs import score
from localkv.errors import UsageError
from localkv.model import Transformer

SHARES = (1.0, 0.5, 0.25)
"""How far back needles are, in shares of the context."""
COUNT = 8
"""Needles at each distance."""
_ANIMALS = ("owl", "fox", "bear", "wolf", "frog", "goat", "hare", "duck")


@dataclass(frozen=True)
class Needle:
    """A text with a sentence in it that its end asks for.

    Attributes:
        prompt: up to where the answer begins.
        answer: the tokens of the right one.
        distance: tokens from the planted sentence's end to the answer.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    distance: int


@dataclass(frozen=True)
class Recall:
    """How well a model recalls the needles at one distance.

    Attributes:
        distance: in tokens, the mean.
        right: how many answers are the greedy continuation, as a whole.
        count: needles.
        log_p: mean logarithm of the probability of the whole answer, in nats.
    """

    distance: int
    right: int
    count: int
    log_p: float


def plant(
    encode: Callable[[str], list[int]],
    text: Sequence[int],
    n_ctx: int,
    *,
    bos_id: int | None = None,
    seed: int = 0,
) -> list[list[Needle]]:
    """`COUNT` needles for each of `SHARES`, which fill the context.

    Args:
        encode: ids of a piece of text, without BOS.
        text: ids of what they are hidden in; each in another part of it, as far as it is long.
        n_ctx: tokens of context.
        bos_id: comes first; None for a model without BOS.
        seed: of animals and numbers.

    Raises:
        UsageError: the text is shorter than the context, or this too short for a needle.
    """
    draw = random.Random(seed)
    return [
        [_needle(encode, text, n_ctx, bos_id, share, draw) for _ in range(COUNT)]
        for share in SHARES
    ]


def _needle(
    encode: Callable[[str], list[int]],
    text: Sequence[int],
    n_ctx: int,
    bos_id: int | None,
    share: float,
    draw: random.Random,
) -> Needle:
    who, number = draw.choice(_ANIMALS), draw.randrange(100, 1000)
    planted = encode(f" The code of the {who} is {number}.")
    question = f"\n\n Question: What is the code of the {who}? Answer: The code of the {who} is"
    asked, answered = encode(question), encode(f"{question} {number}")
    n_same = 0
    while n_same < min(len(asked), len(answered) - 1) and asked[n_same] == answered[n_same]:
        n_same += 1
    asked, answer = answered[:n_same], answered[n_same:]
    first = [] if bos_id is None else [bos_id]
    room = n_ctx - len(first) - len(planted) - len(answered)
    if room < n_ctx // 2:
        raise UsageError(
            f"a context of {n_ctx} tokens has no room for a needle",
            hint=f"use at least {2 * (n_ctx - room)} (-c)",
        )
    if len(text) < room:
        raise UsageError(
            f"the text has {len(text)} tokens, but to hide a needle in a context of {n_ctx} "
            f"takes {room}",
            hint=f"use a longer text, or a context of at most {len(text)} (-c)",
        )
    start = draw.randrange(len(text) - room + 1)
    hay, behind = text[start : start + room], round(share * room)
    prompt = (*first, *hay[: room - behind], *planted, *hay[room - behind :], *asked)
    return Needle(prompt, tuple(answer), behind + len(asked))


def recall(
    model: Transformer, cache: CacheConfig, needles: Sequence[Needle], *, n_batch: int = 512
) -> Recall:
    """How well needles are found through a cache; prompts are evaluated as such, answers as
    generated tokens."""
    engine = Engine(model, cache, n_batch=n_batch)
    to_numpy = model.backend.arrays.to_numpy
    n_right, log_p = 0, 0.0
    for needle in needles:
        n_prompt = len(needle.prompt)
        ids = [*needle.prompt, *needle.answer[:-1]]
        parts = engine.logit_batches(ids, first=n_prompt - 1, n_prompt=n_prompt)
        logits = np.concatenate([np.array(to_numpy(part)) for part in parts])
        answer = np.array(needle.answer)
        n_right += bool((logits.argmax(1) == answer).all())
        log_p -= float(score(logits, answer).nll.sum())
    return Recall(
        distance=round(sum(needle.distance for needle in needles) / len(needles)),
        right=n_right,
        count=len(needles),
        log_p=log_p / len(needles),
    )
