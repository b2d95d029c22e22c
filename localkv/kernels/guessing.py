"""Tokens that a model finds most probable, one after the other, at once: what a draft is made of.

A model that drafts is so small that what Python does for each of its tokens takes longer than the
token itself. So a backend may go on by itself until a guess is not likely enough to be right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from localkv.kernels.backend import MovedBatch, StackLayer


class Guessing(NamedTuple):
    """When tokens are no longer guessed.

    Attributes:
        most: so many are guessed at most.
        n_vocab: only the first tokens of the vocabulary are.
        p_min: none that is less probable.
        bounds: ascending probabilities, between levels.
        chances: by levels, one more than bounds: how likely a guess so probable is right.
        least: by the number of guesses so far, from 1 on, up to `most`: how likely all of them
            must be right for another one to be looked for.
    """

    most: int
    n_vocab: int
    p_min: float
    bounds: Sequence[float]
    chances: Sequence[float]
    least: Sequence[float]

    def goes_on(self, likely: float, number: int) -> bool:
        """Whether another guess follows `number` of them, all right by this chance."""
        return number < self.most and likely > self.least[number - 1]

    def chance(self, probability: float) -> float:
        """How likely a guess that the model gives this probability is right."""
        return self.chances[bisect_right(self.bounds, probability)]


class Guessed(NamedTuple):
    """What was guessed.

    Attributes:
        tokens: one after the other.
        probabilities: that the model gave them.
        n_evaluated: of the tokens that were given, all, and of these but the last ones, which no
            other one was looked for behind.
        seconds: that each of those took.
    """

    tokens: list[int]
    probabilities: list[float]
    n_evaluated: int
    seconds: float


RunGuesses = Callable[
    ["tuple[StackLayer, ...]", "MovedBatch", Sequence[int], Guessing], Guessed | None
]
"""(layers, the first of some tokens as `RunNext` takes it, those that follow it, when it ends) ->
the tokens that follow all of these; their rows go to the same page. None, with nothing stored,
where `RunNext` gives None, and where a token takes more than chains that are run again as they are;
they may also be fewer than `guessing` says."""


def run_no_guesses(
    layers: tuple[StackLayer, ...], moved: MovedBatch, more: Sequence[int], guessing: Guessing
) -> Guessed | None:
    """What backends do that run tokens one by one."""
    return None
