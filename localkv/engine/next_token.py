"""Generated tokens that are like a batch before: run from ids and positions alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from localkv.cache.arrays import Array, Batch
from localkv.cache.kv_cache import KVCache, SteadyRows
from localkv.cache.pages import Sequence
from localkv.kernels.backend import Guessed, Guessing
from localkv.model import Transformer

MANY_SHAPES = 32
"""The most that are remembered."""


class NextTokens:
    """What is known of the last batches of generated tokens, one of each shape.

    Args:
        model, cache: that tokens are run with.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._steady = dict[tuple[int, ...], tuple[Batch, list[SteadyRows]]]()

    def note(self, sequences: Seq[Sequence], batch: Batch) -> None:
        """Take note of a batch of generated tokens at the ends of sequences, which do not count
        them yet. It has the logits of all."""
        starts = batch.starts
        if len(self._steady) >= MANY_SHAPES:
            self._steady.clear()
        self._steady[starts] = (
            batch,
            [
                SteadyRows(self._cache, sequence, end - start)
                for sequence, start, end in zip(sequences, starts, starts[1:], strict=False)
            ],
        )

    def hold(self, sequence: Sequence) -> bool:
        """Whether all that a token at the end of a sequence takes is there."""
        found = self._steady.get((0, 1))
        return found is not None and found[1][0].hold(sequence)

    def guesses(self, sequence: Sequence, ids: Seq[int], guessing: Guessing) -> Guessed | None:
        """The most probable tokens after generated ones, which are at the end of a sequence.

        None, with nothing evaluated, if they have to be run one by one; fewer than `guessing` says
        where they would go to another page.
        """
        found = self._steady.get((0, 1))
        if found is None:
            return None
        batch, (steady,) = found
        most = min(guessing.most, steady.room(sequence) - len(ids) + 1)
        if most < 1:
            return None
        if most < guessing.most:
            guessing = guessing._replace(most=most)
        at = sequence.length
        return self._model.next_guesses(ids, at, batch, self._cache.n_ctx, guessing)

    def logits(self, parts: Seq[tuple[Sequence, Seq[int]]]) -> Array | None:
        """Logits of generated tokens at the ends of sequences, float32 [tokens, n_vocab].

        None if they differ in more than their positions from a batch before, and have to be run as
        a batch.
        """
        starts, token_ids, positions = [0], list[int](), list[int]()
        for sequence, ids in parts:
            token_ids += ids
            positions += range(sequence.length, sequence.length + len(ids))
            starts.append(len(token_ids))
        found = self._steady.get(tuple(starts))
        if found is None:
            return None
        batch, steady = found
        for one, (sequence, _) in zip(steady, parts, strict=True):
            if not one.hold(sequence):
                return None
        out = self._model.next_logits(token_ids, positions, batch, self._cache.n_ctx)
        if out is not None:
            for one, (sequence, _) in zip(steady, parts, strict=True):
                one.step(sequence)
        return out
