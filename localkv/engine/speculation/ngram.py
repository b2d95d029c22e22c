"""`NgramDrafter`: a text that repeats itself, or its prompt, goes on as it did before.

Prompt look-up (Saxena 2023; llama.cpp's `ngram-simple`): no model, only an index of where each
short run of tokens ended last.
"""

from __future__ import annotations

from localkv.engine.speculation.drafter import MOST_SURE

_SIZES = (6, 3, 2)
"""Tokens of the runs that are indexed; the longest that was there before is gone on with."""
_BITS = 32
_MASKS = tuple((1 << _BITS * size) - 1 for size in _SIZES)


class NgramDrafter:
    """Drafts what followed the last tokens when they came up before."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._ends: list[dict[int, int]] = [{} for _ in _SIZES]
        self._last = 0  # of the longest size, tokens as digits of one number: quick to make
        self._at: int | None = None
        self._matched = 0

    def accept(self, token: int) -> None:
        """Take note of the text's next token."""
        ids, at = self._ids, self._at
        n = len(ids)
        for size, mask, ends in zip(_SIZES, _MASKS, self._ends, strict=True):
            if n >= size:
                ends[self._last & mask] = n  # which now is followed by a token
        ids.append(token)
        self._last = (self._last << _BITS | token) & _MASKS[0]
        if at is not None and self._matched >= _SIZES[0] and ids[at] == token:
            self._at = at + 1
            self._matched += 1
        else:
            self._look_up()

    def _look_up(self) -> None:
        ids = self._ids
        self._at, self._matched = None, 0
        for size, mask, ends in zip(_SIZES, _MASKS, self._ends, strict=True):
            at = ends.get(self._last & mask)
            if at is not None and (n := len(ids)) >= size:
                self._at, self._matched = at, size
                while (
                    self._matched < min(MOST_SURE, at)
                    and ids[at - self._matched - 1] == ids[n - self._matched - 1]
                ):
                    self._matched += 1
                return

    @property
    def confidence(self) -> int:
        """How many of the last tokens were there before, up to `MOST_SURE`."""
        return min(self._matched, MOST_SURE)

    def draft(self, most: int) -> list[int]:
        """At most so many tokens that may follow: a run that reaches the end goes round."""
        at = self._at
        if at is None:
            return []
        known = self._ids[at : at + most]
        while len(known) < most:
            known += known[: most - len(known)]
        return known
