"""Generated tokens that are like the one before: run from their id and position alone."""

from __future__ import annotations

from localkv.cache.arrays import Array
from localkv.cache.batch import Batch
from localkv.cache.kv_cache import KVCache
from localkv.cache.pages import Sequence
from localkv.cache.steady_rows import SteadyRows
from localkv.model import Transformer


class NextTokens:
    """What is known of the last generated token that was a batch of its own.

    Args:
        model, cache: that tokens are run with.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._steady: SteadyRows | None = None

    def note(self, sequence: Sequence, batch: Batch) -> None:
        """Take note of a batch of one generated token, at the end of a sequence."""
        self._steady = SteadyRows(self._cache, sequence, batch, sequence.length)

    def hold(self, sequence: Sequence) -> bool:
        """Whether all that a token at the end of a sequence takes is there."""
        return self._steady is not None and self._steady.hold(sequence)

    def logits(self, sequence: Sequence, token: int) -> Array | None:
        """Logits of a generated token at the end of a sequence, float32 [1, n_vocab]; None if it
        differs in more than its position from the one before, and has to be run as a batch."""
        steady = self._steady
        if steady is None or not steady.hold(sequence):
            return None
        out = self._model.next_logits(token, sequence.length, steady.batch, self._cache.n_ctx)
        if out is not None:
            steady.step(sequence)
        return out
