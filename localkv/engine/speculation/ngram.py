"""`NgramDrafter`: a text that repeats itself, or its prompt, goes on as it did before.

Prompt look-up (Saxena 2023; llama.cpp's `ngram-simple`): no model, only an index of where each
short run of tokens ended last.
"""

from __future__ import annotations

from localkv.engine.speculation.drafter import MOST_SURE

_BITS = 32
_TWO, _THREE, _SIX = ((1 << _BITS * size) - 1 for size in (2, 3, 6))
"""Masks of the runs that are indexed, of so many tokens, as digits of one number: quick to make."""


class NgramDrafter:
    """Drafts what followed the last tokens when they came up before.

    Attributes:
        confidence: how many of the last tokens were there before, up to `MOST_SURE`.
    """

    def __init__(self) -> None:
        self.confidence = 0
        self._ids: list[int] = []
        self._two, self._three, self._six = dict[int, int](), dict[int, int](), dict[int, int]()
        self._last = 0  # six tokens
        self._at: int | None = None

    def accept(self, token: int) -> None:
        """Take note of the text's next token."""
        ids, at, last = self._ids, self._at, self._last
        n = len(ids)
        if n > 5:  # the runs that end there now are followed by a token
            self._six[last] = n
        if n > 2:
            self._three[last & _THREE] = n
        if n > 1:
            self._two[last & _TWO] = n
        ids.append(token)
        self._last = (last << _BITS | token) & _SIX
        if at is not None and self.confidence > 5 and ids[at] == token:
            self._at = at + 1
            self.confidence = min(self.confidence + 1, MOST_SURE)
        else:
            self._look_up()

    def _look_up(self) -> None:
        """Where the longest run that was there before goes on."""
        ids, last, matched = self._ids, self._last, 2
        n = len(ids)
        at = self._two.get(last & _TWO) if n > 1 else None
        if at is None:  # and so no longer one
            self._at, self.confidence = None, 0
            return
        three = self._three.get(last & _THREE) if n > 2 else None
        if three is not None:
            at, matched = three, 3
            six = self._six.get(last) if n > 5 else None
            if six is not None:
                at, matched = six, 6
        most = min(MOST_SURE, at)
        while matched < most and ids[at - matched - 1] == ids[n - matched - 1]:
            matched += 1
        self._at, self.confidence = at, matched

    def draft(self, most: int) -> list[int]:
        """At most so many tokens that may follow: a run that reaches the end goes round."""
        at = self._at
        if at is None:
            return []
        known = self._ids[at : at + most]
        while len(known) < most:
            known += known[: most - len(known)]
        return known
