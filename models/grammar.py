"""Expands templates such as "{hero} (walked|ran) home." into sentences."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

_INNERMOST_CHOICE = re.compile(r"\(([^()]*)\)")
_ARTICLE_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")
_SENTENCE_START = re.compile(r"(?<=[.!?] )[a-z]")
_SPACES = re.compile(r" {2,}")


def expand(template: str, slots: Mapping[str, str], rng: random.Random) -> str:
    """Pick one branch of every `(one|two)`, fill every `{slot}` and mend articles and capitals.

    Choices nest. An empty branch, as in `(very|) tired`, leaves nothing behind.
    """
    text = template
    while True:
        text, replaced = _INNERMOST_CHOICE.subn(
            lambda found: rng.choice(found.group(1).split("|")), text
        )
        if not replaced:
            break
    text = _SPACES.sub(" ", text.format_map(slots)).strip()
    text = mend_articles(text)
    text = _SENTENCE_START.sub(lambda found: found.group().upper(), text)
    return text[0].upper() + text[1:]


def mend_articles(text: str) -> str:
    """Turn "a orange flute" into "an orange flute"."""
    return _ARTICLE_BEFORE_VOWEL.sub(r"\1n ", text)
