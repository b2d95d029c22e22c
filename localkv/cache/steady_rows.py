"""Where the rows of a sequence's next tokens go, as long as it takes no other pages for them.

To make the batch of a token takes longer than to see that it is like the one before.
"""

from __future__ import annotations

from localkv.cache.batch import Batch
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS
from localkv.cache.pages import PagePool, Sequence


class SteadyRows:
    """What held when a batch of one token was made, and has to hold for one that follows.

    Args:
        cache: in which the token's rows are.
        sequence: of the token.
        batch: of the token alone.
        position: of the token.

    Attributes:
        batch, position: as given.
    """

    def __init__(self, cache: KVCache, sequence: Sequence, batch: Batch, position: int) -> None:
        self.batch, self.position = batch, position
        self._cache, self._slot = cache, sequence.slot
        self._pages = [list(pages) for pages in sequence.pages]
        self._written = list[tuple[PagePool, int]]()
        self._first, self._end = 0, cache.n_ctx
        for part in cache.parts:
            if part.spec.tail is not None:
                self._end = 0  # what is packed, and what is seen packed, changes
            elif position < part.first:
                self._end = min(self._end, part.first)
            elif position < part.end:
                place = (position - part.first) // PAGE_TOKENS
                first = part.first + place * PAGE_TOKENS
                self._first = max(self._first, first)
                self._end = min(self._end, first + PAGE_TOKENS, part.end)
                self._written.append((cache.pools[part.pool], self._pages[part.pool][place]))
            else:
                self._first = max(self._first, part.end)

    def hold(self, sequence: Sequence) -> bool:
        """Whether all that a token at the end of a sequence takes is there: its rows go to pages
        that the sequence has, which are those of `batch`, and nobody else has the last of them."""
        return (
            self._first <= sequence.length < self._end
            and sequence.slot == self._slot
            and (not self._cache.states or sequence.n_stepped == sequence.length)
            and sequence.pages == self._pages
            and all(pool.n_holders[page] == 1 for pool, page in self._written)
        )

    def step(self, sequence: Sequence) -> None:
        """The token is about to be evaluated."""
        self._cache.states.step(sequence, sequence.length, sequence.length + 1)
