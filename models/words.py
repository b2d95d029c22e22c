"""The word lists from which stories, facts and lists are made."""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GIRLS = _words("Mia Lily Anna Rosa Nina Ella Ida Zoe Emma Ruth Nora Lena")
BOYS = _words("Tom Ben Sam Max Leo Finn Omar Hugo Paul Noah Jack Otto")
NAMES = GIRLS + BOYS
ANIMALS = _words(
    "fox bear owl hare mouse deer frog duck wolf goat hen cat dog pig bee crow swan mole seal "
    "crab horse sheep snail ant rabbit hedgehog squirrel turtle"
)
RARE_ANIMALS = _words(
    "lion tiger elephant monkey dragon bird parrot penguin dolphin whale camel zebra giraffe panda "
    "kitten puppy lizard beetle butterfly spider otter beaver badger hamster rat bat eagle hawk "
    "pigeon sparrow robin goose donkey cow lamb pony moose elk lynx leopard hippo crocodile snake "
    "octopus lobster moth cricket robot princess dwarf giant wizard witch boy girl king queen "
    "dinosaur kangaroo koala raccoon ladybird peacock chicken weasel"
)
COLOURS = _words("red blue green yellow white black brown pink gold silver orange purple")
OBJECTS = _words(
    "key lamp bell cup coin ring drum kite boat book ball hat rope map flute basket stone shell "
    "feather candle mirror spoon clock button"
)
FOODS = _words(
    "bread honey apples soup cake cheese plums nuts berries pears rice corn beans figs milk tea "
    "pie jam peas melon"
)
PLACES = _words(
    "forest river hill garden village meadow cave mill harbour tower valley lake bridge market "
    "barn island orchard castle"
)
TRAITS = _words("little old kind clever brave quiet young shy gentle funny merry curious")
THINGS = ANIMALS + OBJECTS + FOODS + PLACES
VARIABLES = tuple("bcdefghjkmnpqrstuvwxyz")

_ONSETS = _words("B D F G K L M N P R S T V Z Br Dr Gr Kl Tr Pl St")
_MIDDLES = _words("a e i o u")
_CODAS = _words("b d g k l m n p r s t v z")
_ENDS = _words("a o i y in el an or us ix")


def number(rng: random.Random, digits: int) -> str:
    """A random number of exactly `digits` digits that does not start with zero."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def invented_name(rng: random.Random) -> str:
    """A name outside the lists, so that the model learns to copy names it has never seen."""
    syllables = rng.choice(_ONSETS) + rng.choice(_MIDDLES) + rng.choice(_CODAS)
    return syllables + rng.choice(_ENDS)
