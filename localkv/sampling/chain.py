"""The names of the samplers, as the command line takes them."""

from __future__ import annotations

from localkv.errors import UsageError
from localkv.option_names import unknown_name
from localkv.sampling.table import SAMPLER_ORDER, SAMPLERS

_ALIASES = {alias: entry.name for entry in SAMPLERS for alias in entry.aliases}
_LETTERS = {entry.letter: entry.name for entry in SAMPLERS}


def parse_samplers(text: str) -> tuple[str, ...]:
    """A chain written as `--samplers` takes it: names with `;` between them.

    >>> parse_samplers("top-k;temp")
    ('top_k', 'temperature')
    """
    names = [name.strip() for name in text.split(";")]
    chain = tuple(_ALIASES.get(name, name) for name in names if name)
    for name in chain:
        if name not in SAMPLER_ORDER:
            raise unknown_name("unknown sampler", name, SAMPLER_ORDER)
    return chain


def parse_sampler_sequence(text: str) -> tuple[str, ...]:
    """A chain written as `--sampling-seq` takes it: one letter for each sampler.

    >>> parse_sampler_sequence("kt")
    ('top_k', 'temperature')
    """
    for letter in text:
        if letter not in _LETTERS:
            known = ", ".join(f"{letter} {name}" for letter, name in _LETTERS.items())
            raise UsageError(f"unknown sampler {letter!r} in {text!r}", f"samplers: {known}")
    return tuple(_LETTERS[letter] for letter in text)
