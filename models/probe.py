"""Recall tests: a value is told, stories follow, and the value is asked for at a known distance."""

from __future__ import annotations

import random
from dataclasses import dataclass

from corpus import Encoder
from document import ASSISTANT, USER, Document, Kind
from fact import Fact, everyday_fact, passkey, variable
from story import make_story
from words import COLOURS, NAMES, THINGS, number

PROBE_KINDS = (
    "passkey",
    "8 facts, word",
    "8 facts, word, chat",
    "8 facts, number",
    "8 pairs, word",
    "8 pairs, 2 digits",
    "3 variables, half aliased",
)
_TARGET = Kind.REPEAT  # marks the target value where it is told
_ANSWER = Kind.FACT  # marks the target value where it is asked for


@dataclass(frozen=True)
class Probe:
    """`prompt` ends where `answer` must begin; `distance` is measured between the two values."""

    prompt: list[int]
    answer: list[int]
    distance: int


def make_probe(rng: random.Random, encoder: Encoder, kind: str, distance: int) -> Probe:
    """A probe whose distance is `distance` or up to one sentence more."""
    opening, closing = _pairs(rng, kind) if "pairs" in kind else _facts(rng, kind)
    head, head_kinds = encoder.encode_document(opening)
    tail, tail_kinds = encoder.encode_document(closing)
    told_at, asked_at = head_kinds.index(_TARGET), tail_kinds.index(_ANSWER)
    asked_until = len(tail_kinds) - tail_kinds[::-1].index(_ANSWER)
    room = distance - (len(head) - told_at) - asked_at
    middle = _stories(rng, encoder, room, in_chat=kind.endswith("chat"))
    return Probe(
        prompt=[encoder.bos, *head, *middle, *tail[:asked_at]],
        answer=tail[asked_at:asked_until],
        distance=len(head) - told_at + len(middle) + asked_at,
    )


def _facts(rng: random.Random, kind: str) -> tuple[Document, Document]:
    facts: list[Fact] = []
    if kind == "passkey":
        number_of_five = number(rng, 5)
        secret = passkey(rng)
        facts = [Fact(secret.key, secret.statement, number_of_five, secret.question)]
        target = facts[0]
    elif kind.startswith("3 variables"):
        for index in range(4):
            facts.append(variable(rng, facts, alias_chance=float(index == 3)))
        target = facts[3] if rng.random() < 0.5 else rng.choice(facts[:3])
    else:
        for _ in range(8):
            used = {fact.key for fact in facts}
            facts.append(everyday_fact(rng, used, numeric=kind.endswith("number")))
        target = rng.choice(facts)
    in_chat = kind.endswith("chat")
    opening, closing = Document(), Document()
    if in_chat:
        opening.turn(USER).say("Remember this:", Kind.REQUEST)
    for fact in facts:
        opening.say(fact.given or fact.statement)
        opening.say(fact.alias_of or fact.value, _TARGET if fact is target else Kind.FRESH)
        opening.say(fact.tail)
    if in_chat:
        opening.turn(ASSISTANT).say("I will remember that.").end()
        closing.turn(USER).say(target.question).turn(ASSISTANT)
    else:
        closing.say("Question:").say(target.question).say("Answer:")
    closing.say(target.statement).say(target.value, _ANSWER)
    return opening, closing


def _pairs(rng: random.Random, kind: str) -> tuple[Document, Document]:
    keys = rng.sample(THINGS + NAMES, 8)
    if kind.endswith("word"):
        values = rng.sample(THINGS + NAMES + COLOURS, 8)
    else:
        values = [number(rng, 2) for _ in keys]
    target = rng.randrange(8)
    opening, closing = Document().say("Notes:"), Document().say("Recall:")
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        opening.say(key).say(value, _TARGET if index == target else Kind.FRESH)
        opening.say("." if index == 7 else ",")
    closing.say(keys[target]).say(values[target], _ANSWER)
    return opening, closing


def _stories(rng: random.Random, encoder: Encoder, room: int, in_chat: bool) -> list[int]:
    """Whole sentences of stories that fill at least `room` tokens."""
    if room <= 0:
        return []
    document = Document()
    if in_chat:
        document.turn(USER).say("Tell me a story.").turn(ASSISTANT)
    ids: list[int] = []
    waiting: list[str] = []
    while len(ids) < room - in_chat:
        waiting = waiting or list(make_story(rng).sentences)
        document.say(waiting.pop(0))
        ids, _ = encoder.encode_document(document)
    return encoder.encode_document(document.end())[0] if in_chat else ids
