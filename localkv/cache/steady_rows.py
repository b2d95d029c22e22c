"""Where the rows of a sequence's next tokens go, as long as it takes no other pages for them.

To make the batch of some tokens takes longer than to see that it is like the one before.
"""

from __future__ import annotations

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS
from localkv.cache.pages import PagePool, Sequence


class SteadyRows:
    """What held when a batch with some tokens of a sequence was made, and has to hold for one that
    follows with as many.

    Args:
        cache: in which the tokens' rows are.
        sequence: with its length before them.
        n_tokens: how many they are.
    """

    def __init__(self, cache: KVCache, sequence: Sequence, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self._cache, self._slot = cache, sequence.slot
        self._pages = [list(pages) for pages in sequence.pages]
        self._written = list[tuple[PagePool, int]]()
        self._first, self._end = 0, cache.n_ctx
        position, end = sequence.length, sequence.length + n_tokens
        self._ladder = cache.ladder
        self._version = 0 if cache.ladder is None else cache.ladder.version
        for part in cache.parts:
            if part.rung not in (None, 0):
                continue  # of the same pages
            if part.spec.tail is not None:
                self._end = 0  # what is packed, and what is seen packed, changes
            elif end <= part.first:
                self._end = min(self._end, part.first)
            elif part.first <= position and end <= part.end:
                place = (position - part.first) // PAGE_TOKENS
                first = part.first + place * PAGE_TOKENS
                self._first = max(self._first, first)
                self._end = min(self._end, first + PAGE_TOKENS, part.end)
                self._written.append((cache.pools[part.pool], self._pages[part.pool][place]))
            elif part.end <= position:
                self._first = max(self._first, part.end)
            else:
                self._end = 0  # the segment begins or ends among them

    def hold(self, sequence: Sequence) -> bool:
        """Whether all that as many tokens at the end of a sequence take is there: their rows go to
        pages that the sequence has, which are those of the batch, and nobody else has the last of
        them."""
        return (
            self._first <= sequence.length
            and sequence.length + self.n_tokens <= self._end
            and sequence.slot == self._slot
            and (not self._cache.states or sequence.n_stepped == sequence.length)
            and sequence.pages == self._pages
            and self._is_steady(sequence.length + self.n_tokens)
            and all(pool.n_holders[page] == 1 for pool, page in self._written)
        )

    def room(self, sequence: Sequence) -> int:
        """As many tokens behind a sequence's end all go where the next does; 0 if states follow
        each token, or a ladder may change pages."""
        if self._cache.states or self._ladder is not None or not self.hold(sequence):
            return 0
        return self._end - sequence.length

    def _is_steady(self, length: int) -> bool:
        """Whether pages of a ladder are where they were, and none is about to change."""
        ladder = self._ladder
        return ladder is None or (ladder.version == self._version and not ladder.is_due(length))

    def step(self, sequence: Sequence) -> None:
        """The tokens are about to be evaluated."""
        end = sequence.length + self.n_tokens
        self._cache.states.step(sequence, sequence.length, end)
