"""`SamplerState`: the state of samplers from token to token of one generation."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from localkv.sampling.candidates import Ints
from localkv.sampling.dry import Tails, broken_at, last_breaker, repeats

MOST_UNDONE = 256
"""Tokens that can be taken back, at least."""

_MOST_CAUGHT_UP = 16
"""Most new tokens for which DRY's runs are updated one by one; after more, all are recounted."""


class Snapshot(NamedTuple):
    """A state to come back to.

    Attributes:
        n_accepted: tokens of the text.
        random: state of the generator.
        runs: the repeats that are known there.
        breaker: how many tokens were searched for breakers, and where the last begins and ends.
    """

    n_accepted: int
    random: Any
    runs: dict[tuple[int, int], tuple[int, Ints]]
    breaker: tuple[int, int, int]


class SamplerState:
    """The latest tokens, the random generator, and the breakers that DRY stops at.

    Args:
        seed: of the random generator.
        n_ctx: tokens of context, which a `last_n` of -1 stands for.
        windows: the `last_n` of each sampler.
        tails_of: the tokens that complete DRY's breakers which begin in a token (`Breakers`).

    Attributes:
        random: the generator.
        n_accepted: tokens of the text.
    """

    def __init__(
        self,
        seed: int,
        *,
        n_ctx: int,
        windows: Iterable[int],
        tails_of: Callable[[int], Tails],
    ) -> None:
        self._seed = seed
        self._n_ctx = n_ctx
        self._n_kept = max(map(self._window, windows), default=0)
        self.breakers = tails_of
        self.reset()

    def reset(self) -> None:
        """Forgets the tokens and restarts the random generator with the same seed."""
        self._accepted = array("i")
        self.n_accepted = 0
        self._runs: dict[tuple[int, int], tuple[int, Ints]] = {}
        self._breaker = -1 - _MOST_CAUGHT_UP, -1, 0
        self.random = np.random.Generator(np.random.PCG64(self._seed))

    def accept(self, token: int) -> None:
        """Adds a token to the text."""
        self.n_accepted += 1
        if not self._n_kept:
            return
        self._accepted.append(token)
        if len(self._accepted) >= 2 * (self._n_kept + MOST_UNDONE):
            del self._accepted[: -(self._n_kept + MOST_UNDONE)]

    def snapshot(self) -> Snapshot:
        """What `restore` comes back to."""
        random = self.random.bit_generator.state
        return Snapshot(self.n_accepted, random, dict(self._runs), self._breaker)

    def restore(self, snapshot: Snapshot) -> None:
        """Takes back the tokens and the random numbers since a snapshot.

        Raises:
            ValueError: it is of another text or of more than `MOST_UNDONE` tokens ago.
        """
        n_undone = self.n_accepted - snapshot.n_accepted
        if not 0 <= n_undone <= MOST_UNDONE:
            raise ValueError(f"a snapshot of {n_undone} tokens ago is not kept")
        if n_undone and self._n_kept:
            del self._accepted[-n_undone:]
        self.n_accepted = snapshot.n_accepted
        self._runs, self._breaker = dict(snapshot.runs), snapshot.breaker
        self.random.bit_generator.state = snapshot.random

    def recent(self, last_n: int) -> Ints:
        """The last tokens of the text, int64 [at most last_n]; -1 stands for the context."""
        return self._recent(last_n, 0)

    def _recent(self, last_n: int, n_ago: int) -> Ints:
        """What `recent` gave `n_ago` tokens ago."""
        end = len(self._accepted) - n_ago
        # A copy: an array cannot grow while a view of it is held.
        return np.array(self._accepted[max(0, end - self._window(last_n)) : end], np.int64)

    def repeats(self, last_n: int, most: int) -> Ints:
        """For each of the last tokens but the last one, how many up to it equal the last ones.

        As `dry.repeats` of `recent(last_n)`; from one token to the next it is a comparison.
        """
        n_known, lengths = self._runs.get((last_n, most), (0, None))
        n_ago = self.n_accepted - n_known
        if lengths is None or not 0 <= n_ago <= _MOST_CAUGHT_UP:
            lengths, n_ago = repeats(self.recent(last_n), most), 0
        for ago in reversed(range(n_ago)):
            lengths = repeats(self._recent(last_n, ago), most, lengths)
        self._runs[last_n, most] = self.n_accepted, lengths
        return lengths

    def since_breaker(self, last_n: int) -> int:
        """How many of the last tokens follow the last sequence breaker; all of them if they have
        none."""
        kept, n = self._accepted, self.n_accepted
        n_window = min(len(kept), self._window(last_n))
        n_known, start, end = self._breaker
        if 0 <= n - n_known <= _MOST_CAUGHT_UP:
            for i in range(len(kept) - (n - n_known), len(kept)):
                at = n - len(kept) + broken_at(kept, i, self.breakers)
                if at >= max(start, n - len(kept)):
                    start, end = at, n - len(kept) + i + 1
        else:
            start, end = last_breaker(kept[len(kept) - n_window :], self.breakers)
            start, end = (start, end) if start < 0 else (n - n_window + start, n - n_window + end)
        self._breaker = n, start, end
        return n_window if start < n - n_window else n - end

    def _window(self, last_n: int) -> int:
        return self._n_ctx if last_n == -1 else last_n
