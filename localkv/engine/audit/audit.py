"""`Audit`: what a packed cache changed in one answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from localkv.engine.audit.second_reading import Reading
from localkv.errors import counted

FEW_FLIPS = 3
"""Flips that a line names."""
_CLOSE = 0.01
"""Bounds of a divergence that are closer, relative to it, are one number to a reader."""


@dataclass(frozen=True)
class Flip:
    """A token at whose place the two caches have different most likely choices.

    Attributes:
        at: the number of the token in the answer, counted from 1.
        start, end: the characters of the answer that the token at this place became.
        base, base_p: the most likely token with an f16 cache, and its probability there.
        token, p: the most likely token with the packed cache, and its probability there.
    """

    at: int
    start: int
    end: int
    base: str
    base_p: float
    token: str
    p: float

    def __str__(self) -> str:
        return f"token {self.at}: {self.base!r} {self.base_p:.2f} -> {self.token!r} {self.p:.2f}"


@dataclass(frozen=True)
class Audit:
    """What a packed cache changed in one answer.

    Divergences are Kullback-Leibler's, of the distribution with an f16 cache, in nats. Where only
    the most probable tokens were kept, those are the least that they can be.

    Attributes:
        n_tokens: of the answer.
        types: of K and of V, as "q8_0/q4_0".
        kld_mean, kld_mean_most: over all tokens, and the most that it can be.
        kld_max, kld_max_most: the largest, and the most that any can be.
        kld_max_at: the number of the token that has it.
        flips: the tokens with other most likely choices, in order.
        ppl, ppl_base: perplexity of the answer with the packed and with the f16 cache.
        window: tokens of context that each prediction had at most, as there was no memory for an
            f16 cache of all; None for the whole text.
        is_exact: nothing was left out of the divergences.
        seconds: that it took.
    """

    n_tokens: int
    types: str
    kld_mean: float
    kld_mean_most: float
    kld_max: float
    kld_max_most: float
    kld_max_at: int
    flips: tuple[Flip, ...]
    ppl: float
    ppl_base: float
    window: int | None
    is_exact: bool
    seconds: float

    def line(self) -> str:
        """All of it in one line, with the first flips."""
        parts = [
            f"{len(self.flips)} of {counted(self.n_tokens, 'token')} with another most likely "
            f"choice than f16's{self._first_flips()}",
            f"KLD mean {_between(self.kld_mean, self.kld_mean_most)}, "
            f"max {_between(self.kld_max, self.kld_max_most)} at token {self.kld_max_at}",
            f"PPL {self.ppl:.4f} with {self.types}, {self.ppl_base:.4f} with f16",
        ]
        if self.window is not None:
            parts.append(
                f"in windows of {self.window:,} tokens, as an f16 cache of all does not fit"
            )
        return "; ".join(parts)

    def _first_flips(self) -> str:
        if not self.flips:
            return ""
        named = ", ".join(str(flip) for flip in self.flips[:FEW_FLIPS])
        more = len(self.flips) - FEW_FLIPS
        return f" ({named}{f' and {more} more' if more > 0 else ''})"


def _between(least: float, most: float) -> str:
    """A number that is known between bounds."""
    if most - least <= _CLOSE * least:
        return f"{least:.3g}"
    return f"{least:.3g} (at most {most:.3g})"


def audit_of(
    reading: Reading,
    *,
    types: str,
    is_exact: bool,
    seconds: float,
    places: Sequence[tuple[int, int]],
    token_text: Callable[[int], str],
) -> Audit:
    """The figures of a second reading.

    Args:
        places: of each token, the characters of the answer that it became.
        token_text: of an id.
    """
    found = reading.compared
    flips = tuple(
        Flip(
            at + 1,
            *places[at],
            token_text(int(found.best_base[at])),
            float(found.p_best_base[at]),
            token_text(int(found.best[at])),
            float(found.p_best[at]),
        )
        for at in np.flatnonzero(found.best != found.best_base).tolist()
    )
    return Audit(
        n_tokens=len(found.kld),
        types=types,
        kld_mean=float(found.kld.mean()),
        kld_mean_most=float(found.kld_most.mean()),
        kld_max=float(found.kld.max()),
        kld_max_most=float(found.kld_most.max()),
        kld_max_at=int(found.kld.argmax()) + 1,
        flips=flips,
        ppl=math.exp(found.nll.mean()),
        ppl_base=math.exp(found.nll_base.mean()),
        window=reading.window,
        is_exact=is_exact,
        seconds=seconds,
    )
