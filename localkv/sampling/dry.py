"""DRY: a penalty on repeating sequences of tokens, and the breakers it stops at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from localkv.sampling.candidates import Candidates, Ints, find

if TYPE_CHECKING:
    from localkv.sampling.params import SamplingParams
    from localkv.sampling.state import SamplerState

Tails = frozenset[tuple[int, ...]]
"""The tokens that complete a sequence breaker which begins in some token, in each possible way; no
tokens if that token holds the whole breaker."""
NONE: Tails = frozenset()
LONGEST_TAIL = 20
LONGEST_BREAKER_BYTES = 40
_MOST_LENGTHS = 32
"""Lengths of runs that are tried one by one, before all are found at once."""


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


def dry(candidates: Candidates, params: SamplingParams, state: SamplerState) -> Candidates:
    """Lowers the logits of tokens that would go on with a sequence that was there before.

    "Don't repeat yourself" (p-e-w, text-generation-webui #5677). A token is worth
    `multiplier * base ** (length - allowed_length)` off, `length` being the longest run of last
    tokens (not across a sequence breaker) that the token followed earlier; nothing where it is
    shorter than `allowed_length`, or where the token holds a breaker. llama.cpp bounds the exponent
    so that the power stays finite in float32.
    """
    base, allowed_length = params.dry_base, params.dry_allowed_length
    recent, breakers = state.recent(params.dry_penalty_last_n), state.breakers
    n = len(recent)
    limit = state.since_breaker(params.dry_penalty_last_n)
    if n <= allowed_length or limit < allowed_length:
        return candidates
    max_exponent = int(88.7228391 / math.log(base)) if base > 1.000001 else n
    lengths = state.repeats(params.dry_penalty_last_n, allowed_length + max_exponent)
    lengths = np.minimum(lengths, limit)
    again = lengths >= allowed_length
    tokens, inverse = np.unique(recent[1:][again], return_inverse=True)
    longest = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest, inverse, lengths[again])
    breaks = np.array([() in breakers(token) for token in tokens.tolist()], np.bool_)
    penalty = params.dry_multiplier * np.power(base, longest - allowed_length)
    penalty = np.where(breaks, 0.0, penalty)
    at, found = find(candidates.ids, tokens)
    candidates.logits[at] -= penalty[found]
    return candidates
