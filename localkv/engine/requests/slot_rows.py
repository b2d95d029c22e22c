"""The rows of a request that is alone: those of a slot, in which they stay when it is done."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.cache.kv_cache import KVCache
from localkv.engine.requests.request import Request
from localkv.engine.slot.cache_slot import CacheSlot


class SlotRows:
    """What the scheduler moves if there is one request, and other users of its slot.

    Args:
        slot: has the rows.

    Attributes:
        n_reused: tokens of prompts that were found evaluated.
    """

    def __init__(self, slot: CacheSlot) -> None:
        self.slot = slot
        self.n_reused = 0

    @property
    def cache(self) -> KVCache:
        """Has the rows."""
        return self.slot.cache

    def enter(self, running: Sequence[Request]) -> Sequence[Request]:
        """A step begins: those of the requests that have lost their rows to other users."""
        return [one for one in running if not self.slot.is_taken_by(one.text)]

    def forget(self, running: Sequence[Request]) -> None:
        """Nothing: the slot itself gives its rows back after work that broke off."""

    def begin(self, request: Request, running: Sequence[Request]) -> bool:
        """Have the slot go on with the rows that are there of a request's text already."""
        n_reused, n_lost = self.slot.take(request.text)
        request.sequence = self.slot.sequence
        if len(request.text.ids) == request.n_prompt:
            request.n_reused, request.n_lost = n_reused, n_lost
            self.n_reused = n_reused
        return True

    def reserve(self, request: Request, n_tokens: int) -> bool:
        """A context has room for them, and a batch takes the pages that it needs."""
        return True

    def chunk(self, request: Request, n_tokens: int) -> int:
        """The number of its next tokens, at most `n_tokens`, that are to be evaluated together."""
        return self.slot.piece(request.text, n_tokens)

    def reserve_drafts(self, request: Request, n_tokens: int, n_drafts: int) -> bool:
        """Whether guesses don't change the rows of the next tokens."""
        return self.cache.may_guess(self.slot.sequence, n_tokens, n_drafts)

    def retract(self, request: Request, length: int) -> None:
        """Take back the rows of guesses from position `length` on."""
        self.slot.retract(request.text, length)

    def end(self, request: Request) -> None:
        """Its rows stay where they are, for a text that begins like it."""
        request.sequence = None
