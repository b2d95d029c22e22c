"""Facts: a statement that ends in a value, and the question that the statement answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from document import Kind
from words import (
    ANIMALS,
    COLOURS,
    FOODS,
    NAMES,
    OBJECTS,
    PLACES,
    RARE_ANIMALS,
    VARIABLES,
    invented_name,
    number,
)


@dataclass(frozen=True)
class Fact:
    """`statement` + value + `tail` is the whole sentence; `key` names what it is about."""

    key: tuple[str, ...]
    statement: str
    value: str
    question: str
    tail: str = "."
    kind: Kind = Kind.FACT
    given: str | None = None  # how the text states it first, if not as the answer does
    alias_of: str | None = None

    @property
    def is_numeric(self) -> bool:
        return self.value.isdigit()


def _code(rng: random.Random) -> Fact:
    who = rng.choice(ANIMALS)
    value = number(rng, rng.choice((2, 3, 3, 4)))
    return Fact(
        ("code", who), f"The code of the {who} is", value, f"What is the code of the {who}?"
    )


def _likes(rng: random.Random) -> Fact:
    who = rng.choice(NAMES)
    return Fact(("likes", who), f"{who} likes", rng.choice(FOODS), f"What does {who} like?")


def _lives(rng: random.Random) -> Fact:
    who = rng.choice(NAMES)
    value = rng.choice(PLACES)
    return Fact(("lives", who), f"{who} lives by the", value, f"Where does {who} live?")


def _box(rng: random.Random) -> Fact:
    colour = rng.choice(COLOURS)
    value = rng.choice(OBJECTS)
    question = f"What is in the {colour} box?"
    return Fact(("box", colour), f"In the {colour} box is the", value, question)


def _room(rng: random.Random) -> Fact:
    what = rng.choice(OBJECTS)
    question = f"Where is the {what}?"
    return Fact(("room", what), f"The {what} is in room", number(rng, 2), question)


def _age(rng: random.Random) -> Fact:
    who = rng.choice(NAMES)
    value = number(rng, 2)
    return Fact(("age", who), f"The age of {who} is", value, f"How old is {who}?")


def _owner(rng: random.Random) -> Fact:
    what = rng.choice(OBJECTS)
    question = f"Who does the {what} belong to?"
    return Fact(("owner", what), f"The {what} belongs to", rng.choice(NAMES), question)


def _colour(rng: random.Random) -> Fact:
    what = rng.choice(OBJECTS)
    value = rng.choice(COLOURS)
    question = f"What is the colour of the {what}?"
    return Fact(("colour", what), f"The colour of the {what} is", value, question)


def _price(rng: random.Random) -> Fact:
    what = rng.choice(FOODS + OBJECTS)
    question = f"What is the price of the {what}?"
    return Fact(("price", what), f"The price of the {what} is", number(rng, 2), question)


def _pet(rng: random.Random) -> Fact:
    who = rng.choice(NAMES)
    value = rng.choice(ANIMALS)
    return Fact(("pet", who), f"The pet of {who} is the", value, f"What is the pet of {who}?")


_EVERYDAY: tuple[Callable[[random.Random], Fact], ...] = (
    _code,
    _likes,
    _lives,
    _box,
    _room,
    _age,
    _owner,
    _colour,
    _price,
    _pet,
)


def everyday_fact(
    rng: random.Random, used: Collection[tuple[str, ...]], numeric: bool | None = None
) -> Fact:
    """A fact about something that is not in `used`; `numeric` restricts its value."""
    while True:
        fact = rng.choice(_EVERYDAY)(rng)
        if fact.key not in used and (numeric is None or fact.is_numeric is numeric):
            return fact


def passkey(rng: random.Random) -> Fact:
    """A secret: most often a number of five digits."""
    name = rng.choice(("pass key", "pass key", "passkey", "secret number", "magic number"))
    value = number(rng, rng.choice((4, 5, 5, 5, 5, 6)))
    return Fact(
        ("passkey", name), f"The {name} is", value, f"What is the {name}?", kind=Kind.PASSKEY
    )


def password(rng: random.Random) -> Fact:
    """A secret word."""
    name = rng.choice(("secret word", "password", "magic word"))
    value = rng.choice(ANIMALS + COLOURS + FOODS + OBJECTS + PLACES)
    return Fact(
        ("passkey", name), f"The {name} is", value, f"What is the {name}?", kind=Kind.PASSKEY
    )


def variable(rng: random.Random, known: Collection[Fact], alias_chance: float = 0.5) -> Fact:
    """A letter with a number, or another name of a letter that is already known."""
    variables = {fact.key[1]: fact for fact in known if fact.key[0] == "variable"}
    letter = rng.choice([letter for letter in VARIABLES if letter not in variables])
    original = None
    if variables and rng.random() < alias_chance:
        original = rng.choice(list(variables.values()))
    value = original.value if original else number(rng, 2)
    return Fact(
        ("variable", letter),
        f"The value of {letter} is",
        value,
        f"What is the value of {letter}?",
        kind=Kind.VARIABLE,
        given=f"Let {letter} be",
        alias_of=original.key[1] if original else None,
    )


def personal_facts(rng: random.Random, count: int) -> list[Fact]:
    """Different things that a user tells about himself; the answer speaks of "your"."""
    values = {
        "name is": invented_name(rng) if rng.random() < 0.4 else rng.choice(NAMES),
        "favourite colour is": rng.choice(COLOURS),
        "favourite animal is the": rng.choice(ANIMALS + RARE_ANIMALS),
        "favourite food is": rng.choice(FOODS),
        "age is": number(rng, rng.choice((1, 2, 2))),
        "lucky number is": number(rng, rng.choice((1, 2, 3))),
        "best friend is": rng.choice(NAMES),
    }
    claims = rng.sample(list(values), count)
    if rng.random() < 0.5 and "name is" not in claims:
        claims[0] = "name is"
    facts: list[Fact] = []
    for claim in claims:
        topic = claim.removesuffix(" the").removesuffix(" is")
        question = f"{'Who' if topic == 'best friend' else 'What'} is my {topic}?"
        if topic == "age" and rng.random() < 0.5:
            question = "How old am I?"
        key = ("personal", topic)
        facts.append(Fact(key, f"Your {claim}", values[claim], question, given=f"My {claim}"))
    return facts
