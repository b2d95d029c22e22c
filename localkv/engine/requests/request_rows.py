"""Which rows of the cache requests have: what the scheduler decides by, and what it moves."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from localkv.cache.kv_cache import KVCache
from localkv.cache.pages import NoPageError, Sequence
from localkv.engine.requests.request import Request
from localkv.engine.slot.prefix_cache import KeptText, PrefixCache

WORTH_WAITING = 32
"""Tokens that a request waits for another one to evaluate, at least, instead of doing it itself."""


class RequestRows:
    """The rows of all requests that run, and those of texts that are kept.

    Args:
        cache: has the rows.
        prefixes: the texts that are kept in it.
        leave: has others who use the cache keep their rows as a text, before each step.

    Attributes:
        n_reused: tokens of prompts that were found evaluated.
    """

    def __init__(
        self, cache: KVCache, prefixes: PrefixCache, leave: Callable[[], None] = lambda: None
    ) -> None:
        self.cache = cache
        self.prefixes = prefixes
        self.n_reused = 0
        self._leave = leave

    def enter(self, running: Seq[Request]) -> Seq[Request]:
        """A step begins: those of the requests that have lost their rows to other users."""
        self._leave()
        return ()

    def forget(self, running: Seq[Request]) -> None:
        """Give all rows back: they may be anything, as work broke off."""
        for request in running:
            assert request.sequence is not None
            request.sequence.clear()
        self.prefixes.forget()
        self.cache.drop(self.cache.new_sequence())

    def begin(self, request: Request, running: Seq[Request]) -> bool:
        """Give a request a sequence, with the rows that are there of its text already.

        False if there is no room for all of its tokens and a page more for each that runs and may
        come to need one, or if it does better to wait: another one evaluates now what it begins
        with.
        """
        found, n_found = None, 0
        if request.reuses or request.n_preempted:
            ids = request.text.marked(len(request.text.ids) - 1)
            found, n_found = self.prefixes.find(ids, [_as_kept(other) for other in running])
            for other in running:
                theirs = other.text.marked(other.n_prompt)
                n_soon = self.prefixes.n_common(theirs, ids)
                if n_soon > other.n_held and n_soon - n_found >= WORTH_WAITING:
                    return False
        source = self.cache.new_sequence() if found is None else found.sequence
        if running and not self._has_room(request, source, n_found, running):
            return False
        if found is None:
            request.sequence = source
        else:
            request.sequence = self.cache.fork(source, n_found, exactly=self.prefixes.exact)
            self.prefixes.use(found)
        if not request.n_preempted:
            request.n_reused = request.sequence.length
            self.n_reused += request.n_reused
        return True

    def _has_room(
        self, request: Request, source: Sequence, n_found: int, running: Seq[Request]
    ) -> bool:
        """Whether there are pages for all tokens of a request, and one for each that runs and may
        come to need it, or can be made free."""
        length = len(request.text.ids)
        for i, pool in enumerate(self.cache.pools):
            kept = [0] * pool.n_pages
            for text in self.prefixes.texts:
                for page in text.sequence.held(i):
                    kept[page] += 1
            n_full = pool.n_full(n_found)
            shared = set(source.pages[i][:n_full])
            spare = [
                page
                for page, n in enumerate(kept)
                if n > 0 and n == pool.n_holders[page] and page not in shared
            ]
            n_needed = pool.n_needed(length, source, n_found)
            for other in running:
                assert other.sequence is not None
                n_needed += len(other.sequence.pages[i]) < pool.n_places(other.most)
            begun = source.pages[i][n_full : pool.n_places(n_found)]
            if not pool.has_room_for(n_needed, spare, begun):
                return False
        return True

    def reserve(self, request: Request, n_tokens: int) -> bool:
        """Take the pages of its next tokens; False if there are none."""
        assert request.sequence is not None
        try:
            self.cache.reserve(request.sequence, request.n_held + n_tokens)
        except NoPageError:
            return False
        return True

    def chunk(self, request: Request, n_tokens: int) -> int:
        """The number of its next tokens, at most `n_tokens`, that are to be evaluated together:
        fewer where recurrent layers leave a checkpoint."""
        assert request.sequence is not None
        end = request.n_held + n_tokens
        if request.n_held < request.n_prompt:
            end = self.cache.states.boundary(request.sequence, end, request.n_prompt)
        return end - request.n_held

    def hold(self, request: Request, n_tokens: int) -> None:
        """Count tokens that were evaluated."""
        sequence = request.sequence
        assert sequence is not None
        states, end = self.cache.states, sequence.length + n_tokens
        ends_there = end <= request.n_prompt and (
            states.boundary(sequence, end + 1, request.n_prompt) == end
        )
        sequence.length = end
        if end == request.n_prompt:
            self.cache.checkpoint(sequence, exactly=False)
        elif ends_there or states.is_due(sequence):
            states.keep(sequence)

    def reserve_drafts(self, request: Request, n_tokens: int, n_drafts: int) -> bool:
        """Take the pages of guesses, too, that follow its next tokens and may be taken back; False
        if there are none."""
        sequence = request.sequence
        assert sequence is not None
        if not self.cache.may_guess(sequence, n_tokens, n_drafts):
            return False
        if self.reserve(request, n_tokens + n_drafts):
            self.cache.states.mark(sequence)
            return True
        self.cache.cut_back(sequence, sequence.length)  # gives back what was taken of some pools
        self.cache.reserve(sequence, sequence.length + n_tokens)
        return False

    def retract(self, request: Request, length: int) -> None:
        """Take back the rows of guesses from position `length` on.

        What can't be cut there is cut further back, and missing.
        """
        sequence = request.sequence
        assert sequence is not None
        if length < sequence.length:
            self.cache.cut_back(sequence, length, exactly=True)
        self.cache.states.unmark(sequence)

    def end(self, request: Request) -> None:
        """Take its sequence away, and keep its rows as long as there is room."""
        sequence, request.sequence = request.sequence, None
        assert sequence is not None
        self.cache.states.keep(sequence)
        self.prefixes.keep(sequence, request.text.marked(sequence.length))


def _as_kept(request: Request) -> KeptText:
    assert request.sequence is not None
    return KeptText(request.sequence, request.text.marked(request.n_held))
