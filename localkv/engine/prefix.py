"""Texts as the engine has them, and those that it keeps for texts that begin like them.

A text is its tokens, and which of them came as a prompt. One that was evaluated is kept whole, as a
sequence of the cache that nobody continues. Sequences that begin alike share pages, so what several
have in common is there once. Nothing is reserved for them: when the cache has no free page, the
text that was not used for the longest time goes.

Tokens are compared, all of them, and never hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from localkv.cache.arrays import Array
from localkv.cache.kv_cache import KVCache
from localkv.cache.pages import Sequence

GENERATED = 1 << 31
"""Marks a token that was evaluated as a generated one, in an array of marked ids."""
SALTED = 1 << 32
"""What a text's salt is multiplied with there."""


Saw: TypeAlias = Callable[[int, Array], None]
"""(position, [tokens, n_embd])"""


@dataclass(eq=False)
class Text:
    """Tokens that are evaluated one after the other.

    Attributes:
        ids: all of them; the owner of the text adds to them.
        n_prompt: the number of leading tokens that came at once, as a prompt; the others were drawn
            one by one.
        salt: texts of different salts have no rows in common, whatever their tokens are.
        origin: what a salt stands for, in this process and others; only texts that have one, or no
            salt, are kept on a disk.
        scales: of adapters; None for the cache's. Texts of different scales have different salts.
        saw: told of the normed hidden states [tokens, n_embd] of its tokens, and of guesses after
            them, from a position on, as they are evaluated; or None.
    """

    ids: list[int]
    n_prompt: int
    salt: int = 0
    origin: bytes = b""
    saw: Saw | None = None
    scales: tuple[float, ...] | None = None

    def marked(self, length: int) -> NDArray[np.int64]:
        """The first `length` tokens: int64 [length], `marked`."""
        ids = marked(self.ids[:length], np.arange(length) >= self.n_prompt)
        return ids + self.salt * SALTED if self.salt else ids


def marked(ids: list[int], generated: ArrayLike) -> NDArray[np.int64]:
    """Token ids, each with its kind: int64 [len(ids)]."""
    kinds = np.asarray(generated, dtype=np.int64)
    return np.asarray(ids, dtype=np.int64) + kinds * GENERATED


def unmarked(ids: NDArray[np.int64]) -> tuple[list[int], list[bool]]:
    """Token ids, and whether each was generated, of `marked` ones."""
    return (ids % GENERATED).tolist(), (ids & GENERATED > 0).tolist()


def n_common(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> int:
    """The number of leading items that two arrays have in common."""
    n = min(len(ours), len(theirs))
    differ = ours[:n] != theirs[:n]
    return int(differ.argmax()) if differ.any() else n


@dataclass(frozen=True, eq=False)
class KeptText:
    """A text whose rows are in the cache.

    Attributes:
        ids: int64 [tokens], `marked`.
    """

    sequence: Sequence
    ids: NDArray[np.int64]


@dataclass
class PrefixCache:
    """The texts that are kept, those used last at the end.

    Args:
        cache: has the rows; it asks us for room when it has none.
        exact: a row serves only for a token of the same kind: of a prompt, or generated.
        most: texts that are kept at most.

    Attributes:
        texts: what is kept.
        n_dropped: texts that had to go so far.
        leaving: called with a text that has to go, while it still has its pages.
    """

    cache: KVCache
    exact: bool
    most: int = 256
    texts: list[KeptText] = field(default_factory=list)
    n_dropped: int = 0
    leaving: Callable[[KeptText], None] = lambda text: None

    def __post_init__(self) -> None:
        self.cache.call_when_full(self.drop_oldest)

    def find(
        self, ids: NDArray[np.int64], others: Iterable[KeptText] = ()
    ) -> tuple[KeptText | None, int]:
        """The text that has the most of the leading tokens of another, and how many it has.

        Args:
            ids: int64 [tokens], `marked`.
            others: texts that are not kept, but evaluated now.
        """
        best, most = None, 0
        for text in (*others, *reversed(self.texts)):
            n = self.n_common(text.ids, ids)
            if n > most:
                n = self.cache.reachable(text.sequence, n, exactly=self.exact)
            if n > most:
                best, most = text, n
        return best, most

    def n_common(self, ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> int:
        """The number of leading tokens whose rows serve for both."""
        if not self.exact:
            ours, theirs = ours & ~GENERATED, theirs & ~GENERATED
        return n_common(ours, theirs)

    def use(self, text: KeptText) -> None:
        """Note that a text was of use, if it is one of those that are kept."""
        if text in self.texts:
            self.texts.remove(text)
            self.texts.append(text)

    def keep(self, sequence: Sequence, ids: NDArray[np.int64]) -> None:
        """Keep a text that nobody continues. Those that it begins with go: it does for them."""
        ids = ids[: sequence.length]
        self.cache.retire(sequence)
        if not self.cache.reachable(sequence, len(ids), exactly=self.exact):
            self._give_back(sequence)
            return
        for text in [text for text in self.texts if n_common(text.ids, ids) == len(text.ids)]:
            if self.cache.reachable(sequence, len(text.ids), exactly=self.exact) == len(text.ids):
                self.drop(text)
        self.texts.append(KeptText(sequence, ids))
        if len(self.texts) > self.most:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Forget the text that was not used for the longest time; whether there was one."""
        if not self.texts:
            return False
        self.leaving(self.texts[0])
        self.drop(self.texts[0])
        self.n_dropped += 1
        return True

    def clear(self) -> None:
        """Forget all."""
        while self.texts:
            self.drop(self.texts[-1])

    def forget(self) -> None:
        """Forget all, whatever an exception between two instructions has left of them: the cache is
        to start over."""
        self.texts = []

    def drop(self, text: KeptText) -> None:
        """Forget one.

        It stays a kept text until its pages are given back, so that `forget` finds it if an
        exception comes between.
        """
        self._give_back(text.sequence)
        self.texts.remove(text)

    def _give_back(self, sequence: Sequence) -> None:
        self.cache.cut_back(sequence, 0)
