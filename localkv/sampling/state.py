"""`SamplerState`: the state of samplers from token to token of one generation."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from localkv.sampling.candidates import Ints
from localkv.sampling.dry import Breakers


class SamplerState:
    """The latest tokens, the random generator, and the breakers that DRY stops at.

    Args:
        seed: of the random generator.
        n_ctx: tokens of context, which a `last_n` of -1 stands for.
        windows: the `last_n` of each sampler.
        find_breakers: DRY's sequence breakers; called once, when they are first needed.

    Attributes:
        random: the generator.
    """

    def __init__(
        self,
        seed: int,
        *,
        n_ctx: int,
        windows: Iterable[int],
        find_breakers: Callable[[], Breakers],
    ) -> None:
        self._seed = seed
        self._n_ctx = n_ctx
        self._n_kept = max(map(self._window, windows), default=0)
        self._find_breakers = find_breakers
        self.reset()

    def reset(self) -> None:
        """Forgets the tokens and starts the random generator anew, with the same seed."""
        self._accepted = array("i")
        self.random = np.random.Generator(np.random.PCG64(self._seed))

    def accept(self, token: int) -> None:
        """Adds a token to the text."""
        if not self._n_kept:
            return
        self._accepted.append(token)
        if len(self._accepted) >= 2 * self._n_kept:
            del self._accepted[: -self._n_kept]

    def recent(self, last_n: int) -> Ints:
        """The last tokens of the text, int64 [at most last_n]; -1 stands for the context."""
        # A copy: an array cannot grow while a view of it is held.
        return np.array(self._accepted[-self._window(last_n) :], np.int64)

    def _window(self, last_n: int) -> int:
        return self._n_ctx if last_n == -1 else last_n

    @cached_property
    def breakers(self) -> Breakers:
        return self._find_breakers()
