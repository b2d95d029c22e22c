"""`NgramDrafter`: a text that repeats itself, or its prompt, goes on as it did before.

Prompt look-up (Saxena 2023; llama.cpp's `ngram-simple`): no model, only an index of where each
short run of tokens ended last.
"""

from __future__ import annotations

from localkv.engine.speculation.drafter import MOST_SURE

_SIZES = (6, 3, 2)
"""Tokens of the runs that are indexed; the longest that was there before is gone on with."""


class NgramDrafter:
    """Drafts what followed the last tokens when they came up before."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in _SIZES]
        self._runs: list[tuple[int, ...]] = []
        self._at: int | None = None
        self._matched = 0

    def accept(self, token: int) -> None:
        """Take note of the text's next token."""
        ids, at = self._ids, self._at
        n = len(ids)
        for run, ends in zip(self._runs, self._ends, strict=False):
            ends[run] = n  # it ends before the token, so now there is one that follows it
        ids.append(token)
        if n + 1 >= _SIZES[-1]:
            self._runs = [tuple(ids[-size:]) for size in _SIZES]
        if at is not None and self._matched >= _SIZES[0] and ids[at] == token:
            self._at = at + 1
            self._matched += 1
        else:
            self._look_up()

    def _look_up(self) -> None:
        ids = self._ids
        self._at, self._matched = None, 0
        for run, ends in zip(self._runs, self._ends, strict=False):
            at = ends.get(run)
            if at is not None:
                self._at, self._matched = at, len(run)
                n = len(ids)
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
