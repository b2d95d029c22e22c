"""Little conversations: stories on request, facts to remember, and small talk."""

from __future__ import annotations

import random

from document import ASSISTANT, SYSTEM, USER, Document, Kind
from fact import Fact, personal_facts
from grammar import mend_articles
from note import answer, new_facts, state
from story import Cast, Story, make_cast, make_story
from words import NAMES, RARE_ANIMALS, THINGS, invented_name

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a kind storyteller.",
    "You tell short stories and remember facts.",
    "Answer the questions of the user.",
)
_SMALL_TALK = (
    ("Hello!", "Hello! I can tell you a story, or remember facts for you."),
    ("Hi!", "Hello! I can tell you a story, or remember facts for you."),
    ("Hello, how are you?", "I am well, thank you. Shall I tell you a story?"),
    ("Who are you?", "I am a very small storyteller. I can tell stories and remember facts."),
    ("What is your name?", "My name is Tales. I am a very small storyteller."),
    ("What can you do?", "I can tell short stories about animals, and I can remember facts."),
    ("Thank you!", "You are welcome!"),
    ("Thanks!", "You are welcome!"),
    ("Good morning!", "Good morning! Shall I tell you a story?"),
    ("Good night!", "Good night! Sleep well."),
    ("Goodbye!", "Goodbye! Come back soon."),
)
_REQUESTS_WITH_NAME = (
    "Tell me a story about a {animal} named {hero}.",
    "Tell me a story about a {animal} named {hero}.",
    "Tell me a story about a {animal} called {hero}.",
    "Tell me a story about a {trait} {animal} named {hero}.",
    "Tell me a story about {hero} the {animal}.",
    "Tell a short story about a {animal} named {hero}.",
    "Write a story about a {animal} named {hero}.",
    "Write a short story about {hero}, a {trait} {animal}.",
    "Please tell me a story about a {animal} named {hero}!",
    "Can you tell me a story about a {animal} named {hero}?",
)
_REQUESTS_WITHOUT_NAME = (
    "Tell me a story about a {animal}.",
    "Tell me a story about a {trait} {animal}.",
    "Write a short story about a {animal}.",
    "Can you tell me a story about a {animal}?",
)
_OPEN_REQUESTS = ("Tell me a story.", "Tell me a short story.", "Please tell me another story.")
_NOTED = ("I will remember that.", "I will remember it.", "Thank you, I will remember that.")
_REMEMBER = ("Remember this:", "Please remember this:", "Remember:", "Remember this.", "")


def request_story(
    document: Document,
    rng: random.Random,
    short: bool = False,
    rare: bool = False,
    careful: bool = False,
) -> Story:
    """A user's wish and the story that grants it, whose asked-for words count more.

    A rare wish is for an animal, and often for a name, that no other document knows. In a careful
    story all names and animals count more.
    """
    draw = rng.random() * (0.9 if rare else 1.0)
    if draw < 0.65:
        request, asked = rng.choice(_REQUESTS_WITH_NAME), ("hero", "animal", "trait")
    elif draw < 0.9:
        request, asked = rng.choice(_REQUESTS_WITHOUT_NAME), ("animal", "trait")
    else:
        request, asked = rng.choice(_OPEN_REQUESTS), ()
    cast = _rare_cast(rng) if rare else make_cast(rng)
    story = make_story(rng, cast, short)
    wanted = {name: getattr(cast, name) for name in asked if "{" + name + "}" in request}
    request = mend_articles(request.format(**wanted))
    document.turn(USER).say(request, Kind.REQUEST).turn(ASSISTANT)
    kinds = name_kinds(story) if careful else {}
    kinds |= dict.fromkeys(wanted.values(), Kind.CUE)
    for sentence in story.sentences:
        document.say_marked(sentence, kinds)
    document.end()
    return story


def name_kinds(story: Story) -> dict[str, Kind]:
    """Marks the hero, the friend and what animals they are."""
    slots = story.cast.slots
    return dict.fromkeys((slots["h"], slots["a"], slots["f"], slots["b"]), Kind.NAME)


def story_chat(
    rng: random.Random, short: bool = False, rare: bool = False, careful: bool = False
) -> Document:
    """One request and its story, sometimes with a question about it or a word of thanks."""
    document = Document()
    _maybe_system(document, rng)
    if rng.random() < 0.06:
        _small_talk(document, rng)
    story = request_story(document, rng, short, rare, careful)
    if rng.random() < 0.15:
        hero, animal = story.cast.hero, story.cast.animal
        _ask(document, "Who is the story about?")
        document.say("The story is about").say(hero, Kind.FACT)
        document.say(", an" if animal[0] in "aeiou" else ", a")
        document.say(animal, Kind.FACT).say(".").end()
    if rng.random() < 0.06:
        _small_talk(document, rng)
    return document


def memory_chat(rng: random.Random, length: int) -> Document:
    """Facts told by the user and asked for later, with stories and small talk in between."""
    document = Document()
    _maybe_system(document, rng)
    known: list[Fact] = []
    size = 0
    while size < length:
        known = _tell_facts(document, rng, known, length)
        for _ in range(rng.randint(1, 3)):
            draw = rng.random()
            if draw < 0.45:
                request_story(document, rng, short=rng.random() < (0.8 if length < 1500 else 0.4))
            elif draw < 0.5:
                _small_talk(document, rng)
            elif draw < 0.56:
                _repeat_after_me(document, rng)
            for fact in rng.sample(known, min(len(known), rng.randint(1, 5))):
                _ask(document, fact.question)
                answer(document, fact)
                document.end()
        size = len(document.text)
    return document


def personal_chat(rng: random.Random, length: int) -> Document:
    """The user tells about himself, hears a story or two and asks what the assistant remembers."""
    document = Document()
    _maybe_system(document, rng)
    facts = personal_facts(rng, rng.randint(1, 5))
    _introduce(document, rng, facts)
    while len(document.text) < length:
        if rng.random() < 0.5:
            request_story(document, rng, short=rng.random() < 0.5, rare=rng.random() < 0.3)
        elif rng.random() < 0.3:
            _small_talk(document, rng)
        for fact in rng.sample(facts, rng.randint(1, len(facts))):
            _ask(document, fact.question)
            answer(document, fact)
            document.end()
        if rng.random() < 0.2:
            break
    return document


def _introduce(document: Document, rng: random.Random, facts: list[Fact]) -> None:
    """Personal facts in one turn or in a turn each; a name is greeted."""
    in_one_turn = rng.random() < 0.5
    for index, fact in enumerate(facts):
        if index == 0 or not in_one_turn:
            document.turn(USER)
        if index == 0 and rng.random() < 0.3:
            document.say(rng.choice(("Hello!", "Hi!")), Kind.REQUEST)
        state(document, fact)
        if in_one_turn and index < len(facts) - 1:
            continue
        document.turn(ASSISTANT)
        if fact.key[1] == "name":
            document.say("Nice to meet you,").say(fact.value, Kind.FACT).say("!").end()
        else:
            document.say(rng.choice(_NOTED)).end()


def _rare_cast(rng: random.Random) -> Cast:
    hero = invented_name(rng) if rng.random() < 0.4 else rng.choice(NAMES)
    return make_cast(rng, hero, rng.choice(RARE_ANIMALS))


def _tell_facts(
    document: Document, rng: random.Random, known: list[Fact], length: int
) -> list[Fact]:
    """One user turn with facts, or several turns of one fact each; returns all facts known now."""
    keys = {fact.key for fact in known}
    fresh = [
        fact
        for fact in new_facts(rng, rng.choice((1, 1, 2, 3, 4, 5, 8)))
        if fact.key not in keys and (fact.alias_of is None or not keys)
    ]
    if not fresh or len(known) > 40:
        return known
    asks_at_once = rng.random() < 0.25
    one_turn = asks_at_once or rng.random() < 0.6
    if one_turn:
        document.turn(USER)
        _say_request(document, rng.choice(_REMEMBER))
        for fact in fresh:
            state(document, fact)
        if asks_at_once:
            if rng.random() < 0.5:
                for sentence in make_story(rng, short=length < 1500).sentences:
                    document.say(sentence, Kind.REQUEST)
            fact = rng.choice(fresh)
            document.say(fact.question, Kind.REQUEST).turn(ASSISTANT)
            answer(document, fact)
            document.end()
        else:
            document.turn(ASSISTANT).say(rng.choice(_NOTED)).end()
        return known + fresh
    for fact in fresh:
        document.turn(USER)
        _say_request(document, rng.choice(_REMEMBER))
        state(document, fact)
        document.turn(ASSISTANT).say(rng.choice(_NOTED)).end()
    return known + fresh


def _repeat_after_me(document: Document, rng: random.Random) -> None:
    words = [rng.choice(THINGS + NAMES) for _ in range(rng.randint(2, 12))]
    document.turn(USER).say(rng.choice(("Repeat after me:", "Repeat these words:")), Kind.REQUEST)
    for index, word in enumerate(words):
        document.say(word, Kind.FRESH).say("," if index < len(words) - 1 else ".", Kind.FRESH)
    document.turn(ASSISTANT)
    for index, word in enumerate(words):
        document.say(word, Kind.LIST).say("," if index < len(words) - 1 else ".", Kind.REPEAT)
    document.end()


def _ask(document: Document, question: str) -> None:
    document.turn(USER).say(question, Kind.REQUEST).turn(ASSISTANT)


def _say_request(document: Document, text: str) -> None:
    if text:
        document.say(text, Kind.REQUEST)


def _maybe_system(document: Document, rng: random.Random) -> None:
    if rng.random() < 0.25:
        document.turn(SYSTEM).say(rng.choice(_SYSTEM_PROMPTS), Kind.REQUEST)


def _small_talk(document: Document, rng: random.Random) -> None:
    said, reply = rng.choice(_SMALL_TALK)
    _ask(document, said)
    document.say(reply).end()
