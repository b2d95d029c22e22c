"""Plain-text documents that train memory: facts, lists, repeats, and questions about them."""

from __future__ import annotations

import random

from document import Document, Kind
from fact import Fact, everyday_fact, passkey, password, variable
from story import make_story
from words import COLOURS, NAMES, THINGS, number


def state(document: Document, fact: Fact) -> None:
    """Tell a fact for the first time."""
    document.say(fact.given or fact.statement)
    document.say(fact.alias_of or fact.value, Kind.FRESH)
    document.say(fact.tail)


def answer(document: Document, fact: Fact) -> None:
    """Tell a known fact again."""
    document.say(fact.statement)
    document.say(fact.value, fact.kind)
    document.say(fact.tail)


def new_fact(rng: random.Random, known: list[Fact]) -> Fact:
    """Any kind of fact that is not among the known ones."""
    draw = rng.random()
    if draw < 0.12 and not any(fact.key[0] == "passkey" for fact in known):
        return passkey(rng) if draw < 0.08 else password(rng)
    if draw < 0.34 and sum(fact.key[0] == "variable" for fact in known) < 15:
        return variable(rng, known)
    return everyday_fact(rng, {fact.key for fact in known})


def new_facts(rng: random.Random, count: int) -> list[Fact]:
    """Several facts, of many kinds or (one time in four) all variables."""
    facts: list[Fact] = []
    only_variables = rng.random() < 0.25
    for _ in range(count):
        facts.append(variable(rng, facts) if only_variables else new_fact(rng, facts))
    return facts


def notebook(rng: random.Random, length: int) -> Document:
    """Facts first, then whole stories with questions between them, about `length` characters."""
    document = Document()
    known: list[Fact] = []
    size = 0
    separator = "\n" if rng.random() < 0.15 else None
    heading = rng.random() < 0.3
    question_mark, answer_mark = rng.choice((("Question:", "Answer:"), ("Q:", "A:")))
    while size < length:
        if heading:
            document.say(rng.choice(("Notes:", "Remember these facts.", "Facts:")))
        for _ in range(rng.choice((1, 1, 2, 3, 4, 5, 6, 8, 10))):
            fact = new_fact(rng, known) if len(known) < 40 else rng.choice(known)
            if fact not in known:
                known.append(fact)
                state(document, fact)
                if separator:
                    document.say(separator)
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.55:
                _tell(document, rng, length)
                if separator:
                    document.say(separator)
            for fact in rng.sample(known, min(len(known), rng.randint(1, 6))):
                document.say(question_mark).say(fact.question).say(answer_mark)
                answer(document, fact)
                if separator:
                    document.say(separator)
        size = len(document.text)
    return document.end()


def word_list(rng: random.Random, length: int, with_stories: bool) -> Document:
    """Lists of keys and values, recalled in another order, at once or after a story."""
    document = Document()
    size = 0
    while size < length:
        count = rng.randint(2, 14)
        keys = rng.sample(THINGS + NAMES, count)
        values = _list_values(rng, count)
        joint, stop = rng.choice(("", "", ":", "=")), ","
        pairs = list(zip(keys, values, strict=True))
        document.say("Notes:")
        _say_pairs(document, pairs, joint, stop, Kind.FRESH)
        for _ in range(rng.randint(1, 2)):
            if with_stories:
                _tell(document, rng, length)
            document.say("Recall:")
            _say_pairs(document, rng.sample(pairs, count), joint, stop, Kind.LIST)
        size = len(document.text)
    return document.end()


def repeated_words(rng: random.Random, length: int, vocabulary: list[str]) -> Document:
    """Random words, then the same words again: the purest exercise in copying."""
    document = Document()
    size = 0
    while size < length:
        words = [rng.choice(vocabulary) for _ in range(rng.randint(6, 50))]
        for word in words:
            document.say(word, Kind.FRESH)
        for _ in range(rng.randint(1, 2)):
            document.say(words[0], Kind.FRESH)
            for word in words[1:]:
                document.say(word, Kind.REPEAT)
        size = len(document.text)
    return document


def _tell(document: Document, rng: random.Random, length: int) -> None:
    for sentence in make_story(rng, short=rng.random() < (0.9 if length < 1500 else 0.4)).sentences:
        document.say(sentence)


def _list_values(rng: random.Random, count: int) -> list[str]:
    style = rng.randrange(4)
    if style == 0:
        return [rng.choice(THINGS + NAMES + COLOURS) for _ in range(count)]
    if style == 1:
        return rng.sample(THINGS + NAMES + COLOURS, count)
    return [number(rng, style if style == 2 else rng.choice((1, 3))) for _ in range(count)]


def _say_pairs(
    document: Document, pairs: list[tuple[str, str]], joint: str, stop: str, kind: Kind
) -> None:
    for index, (key, value) in enumerate(pairs):
        document.say(key, Kind.FRESH)
        if joint:
            document.say(joint)
        document.say(value, kind).say("." if index == len(pairs) - 1 else stop)
