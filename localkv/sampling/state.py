"""`SamplerState`: what samplers know of a text from token to token of one generation.

It has the latest tokens, the random generator, and what samplers that correct themselves have
learnt from the tokens that were drawn. For DRY it knows where the last sequence breaker is and
which tokens repeat earlier ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from localkv.sampling.candidates import Floats, Ints

MOST_UNDONE = 256
"""Tokens that can be taken back, at least."""

_MOST_CAUGHT_UP = 16
"""Most new tokens for which DRY's runs are updated one by one; after more, all are recounted."""

Tails = frozenset[tuple[int, ...]]
"""The tokens that complete a sequence breaker which begins in some token, in each possible way; no
tokens if that token holds the whole breaker."""
NONE: Tails = frozenset()
LONGEST_TAIL = 20
LONGEST_BREAKER_BYTES = 40
_MOST_LENGTHS = 32
"""Lengths of runs that are tried one by one, before all are found at once."""


class Snapshot(NamedTuple):
    """A state to come back to.

    Attributes:
        n_accepted: tokens of the text.
        random: state of the generator.
        runs: the repeats that are known there.
        breaker: how many tokens were searched for breakers, and where the last begins and ends.
        feedback: what the drawn tokens have taught a sampler.
    """

    n_accepted: int
    random: Any
    runs: dict[tuple[int, int], tuple[int, Ints]]
    breaker: tuple[int, int, int]
    feedback: tuple[float, ...] | None


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
        feedback: what the drawn tokens have taught the sampler that corrects itself, of which a
            chain has at most one; None before the first.
        after: what `feedback` will be, given the index of the candidate that is drawn and all
            candidates' probabilities, float64 [n]. A sampler that corrects itself sets it.
    """

    def __init__(
        self, seed: int, *, n_ctx: int, windows: Iterable[int], tails_of: Callable[[int], Tails]
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
        self.feedback: tuple[float, ...] | None = None
        self.after: Callable[[int, Floats], tuple[float, ...]] | None = None
        self._drawn: tuple[int, tuple[float, ...]] | None = None
        self.random = np.random.Generator(np.random.PCG64(self._seed))

    def drew(self, token: int, at: int, probabilities: Floats) -> None:
        """Notes what a token teaches, if it becomes part of the text.

        Args:
            at: its index among the candidates.
            probabilities: theirs, float64 [n].
        """
        if self.after is not None:
            self._drawn, self.after = (token, self.after(at, probabilities)), None

    def accept(self, token: int) -> None:
        """Adds a token to the text. One that was not drawn teaches nothing."""
        if self._drawn is not None:
            drawn, feedback = self._drawn
            if token == drawn:
                self.feedback = feedback
            self._drawn = None
        self.n_accepted += 1
        if not self._n_kept:
            return
        self._accepted.append(token)
        if len(self._accepted) >= 2 * (self._n_kept + MOST_UNDONE):
            del self._accepted[: -(self._n_kept + MOST_UNDONE)]

    def snapshot(self) -> Snapshot:
        """What `restore` comes back to."""
        random = self.random.bit_generator.state
        runs = dict(self._runs)
        return Snapshot(self.n_accepted, random, runs, self._breaker, self.feedback)

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
        self.feedback, self._drawn = snapshot.feedback, None
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

        What the function `repeats` says of `recent(last_n)`; from one token to the next it is one
        comparison.
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


class Breakers:
    """The token sequences in which a sequence breaker can turn up.

    Either a token holds the breaker, or a token ends with its beginning and the rest follows, as
    the tokenizer cuts it. As in llama.cpp a breaker is cut to 40 bytes and the rest to 20 tokens.
    A token is looked at when it turns up, since a vocabulary has too many of them.

    Args:
        texts: the breakers.
        token_text: text of a token.
        tokenize: cuts the rest of a breaker; without it, only whole breakers are found.
    """

    def __init__(
        self,
        texts: Sequence[str],
        token_text: Callable[[int], str],
        tokenize: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        cut = (text.encode()[:LONGEST_BREAKER_BYTES].decode(errors="ignore") for text in texts)
        self._texts = tuple(dict.fromkeys(text for text in cut if text))
        self._token_text = token_text
        self._tokenize = tokenize
        self._begun = dict[str, list[str]]()
        for text in self._texts:
            for n in range(1, len(text)):
                self._begun.setdefault(text[:n], []).append(text)
        self._longest = max(map(len, self._begun), default=0)
        self._tails = dict[int, Tails]()
        self._rests = dict[str, tuple[int, ...]]()

    def __call__(self, token: int) -> Tails:
        """The tokens that complete the breakers which begin in a token."""
        tails = self._tails.get(token)
        if tails is None:
            tails = self._tails[token] = self._found(self._token_text(token))
        return tails

    def _found(self, word: str) -> Tails:
        within = {text for text in self._texts if text in word}
        found: set[tuple[int, ...]] = {()} if within else set()
        for n in range(1, min(len(word), self._longest) + 1):
            for text in self._begun.get(word[-n:], ()):
                if text not in within and (rest := self._rest(text[n:])):
                    found.add(rest)
        return frozenset(found)

    def _rest(self, text: str) -> tuple[int, ...]:
        """The first tokens of the rest of a breaker."""
        ids = self._rests.get(text)
        if ids is None:
            cut = () if self._tokenize is None else self._tokenize(text)
            ids = self._rests[text] = tuple(cut)[:LONGEST_TAIL]
        return ids


def broken_at(tokens: Sequence[int], i: int, tails_of: Callable[[int], Tails]) -> int:
    """Where the last breaker that token `i` completes begins; -1 if it completes none."""
    for start in range(i, max(-1, i - LONGEST_TAIL - 1), -1):
        tails = tails_of(tokens[start])
        if tails and tuple(tokens[start + 1 : i + 1]) in tails:
            return start
    return -1


def last_breaker(tokens: Sequence[int], tails_of: Callable[[int], Tails]) -> tuple[int, int]:
    """Where the last breaker in a text begins and ends, the longest one there; (-1, 0) if there is
    none."""
    n = len(tokens)
    for start in range(n - 1, -1, -1):
        if tails := tails_of(tokens[start]):
            sizes = sorted({len(tail) for tail in tails}, reverse=True)
            for size in sizes:
                end = start + 1 + size
                if end <= n and tuple(tokens[start + 1 : end]) in tails:
                    return start, end
    return -1, 0


def repeats(recent: Ints, most: int, before: Ints | None = None) -> Ints:
    """How many tokens, up to and with each but the last, equal the last ones: int64 [n - 1].

    Args:
        recent: tokens of the text.
        most: longer runs count as `most`.
        before: the result for the text without its last token. With it, each token is compared
            once, with the last. It may go back further.
    """
    n = len(recent)
    lengths = np.zeros(n - 1, np.int64)
    if before is not None:
        lengths[1:] = before[len(before) - (n - 2) :]
        lengths = np.minimum(lengths + 1, np.minimum(np.arange(1, n), most))
        return np.where(recent[:-1] == recent[-1], lengths, 0)
    ends = np.arange(n - 1)
    for length in range(1, min(most, _MOST_LENGTHS) + 1):
        ends = ends[ends >= length - 1]
        ends = ends[recent[ends - (length - 1)] == recent[n - length]]
        if not len(ends):
            return lengths
        lengths[ends] = length
    return lengths if most <= _MOST_LENGTHS else np.minimum(_common_ends(recent.tolist()), most)


def _common_ends(tokens: list[int]) -> Ints:
    """What `repeats` says, without a limit. The Z algorithm (Gusfield 1997), from the end on, takes
    a step for each token, however long the runs are."""
    tokens.reverse()
    n = len(tokens)
    found, left, right = [0] * n, 0, 0
    for i in range(1, n):
        size = min(right - i, found[i - left]) if i < right else 0
        while i + size < n and tokens[size] == tokens[i + size]:
            size += 1
        if i + size > right:
            left, right = i, i + size
        found[i] = size
    return np.array(found[:0:-1], np.int64)
