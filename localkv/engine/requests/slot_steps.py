"""A step on the model of the request that has a slot."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.cache.arrays import Array
from localkv.engine.requests.scheduler import Part
from localkv.engine.slot.cache_slot import CacheSlot


class SlotSteps:
    """Evaluates the parts of steps of one request.

    Args:
        slot: whose model and cache it uses, in a turn.
    """

    def __init__(self, slot: CacheSlot) -> None:
        self.slot = slot

    def evaluate(self, parts: Sequence[Part]) -> Sequence[tuple[Part, Array]]:
        """Run the model on the one part of a step.

        Returns:
            if it has no more, float32 [1 + drafts, n_vocab] after its last token and after each
            draft.
        """
        (part,) = parts
        slot, text = self.slot, part.request.text
        if part.drafts or part.n_tokens == 1:
            out = slot.advance(text, part.n_tokens, part.drafts)
        else:
            end = slot.sequence.length + part.n_tokens
            while slot.sequence.length < end:
                out = slot.advance(text, slot.piece(text, end - slot.sequence.length))
        is_end = slot.sequence.length >= len(text.ids)
        return [(part, out)] if is_end else []
