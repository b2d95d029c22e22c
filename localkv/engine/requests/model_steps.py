"""A step on the model: parts of requests as a batch, or as a recorded one of those that decode."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.cache.arrays import Array
from localkv.cache.batch import Wanted
from localkv.cache.pages import Sequence as CachedSequence
from localkv.engine.requests.recorded_batches import RecordedBatches
from localkv.engine.requests.request_rows import RequestRows
from localkv.engine.requests.scheduler import Part
from localkv.engine.slot.cache_slot import CacheSlot
from localkv.engine.slot.next_token import NextTokens


class ModelSteps:
    """Evaluates the parts of steps.

    Args:
        slot: whose model and cache it uses, in a turn.
        rows: of the requests.

    Attributes:
        recorded: repeats steps of requests that decode a token each, where the backend records.
    """

    def __init__(self, slot: CacheSlot, rows: RequestRows) -> None:
        self.slot = slot
        self.rows = rows
        records = slot.loop is not None
        self.recorded = RecordedBatches(slot.model, slot.cache) if records else None
        self._next = NextTokens(slot.model, slot.cache)

    def evaluate(self, parts: Sequence[Part]) -> list[tuple[Part, Array]]:
        """Run the model on the parts of a step.

        Returns:
            of those that have no more, float32 [1 + drafts, n_vocab] after their last token and
            after each draft.
        """
        slot = self.slot
        n_tokens = sum(part.n_rows for part in parts)
        if n_tokens > len(parts):
            slot.check_source()
        slot.use_threads(n_tokens)
        ends, others = list[tuple[Part, Array]](), parts
        with slot.scratch_of(n_tokens):
            if self.recorded is not None:
                single = [part for part in parts if part.request.is_decoding and part.n_rows == 1]
                logits = self._decode_recorded(self.recorded, single)
                if logits is not None:
                    ends = [(part, row[None]) for part, row in zip(single, logits, strict=True)]
                    others = [part for part in parts if part not in single]
            if self.recorded is None:
                ends = self._evaluate_next(others) or self._evaluate_batch(others)
            elif others:
                ends += self._evaluate_batch(others)
        for part in parts:
            self.rows.hold(part.request, part.n_rows)
        return ends

    @staticmethod
    def _decode_recorded(recorded: RecordedBatches, parts: Sequence[Part]) -> Array | None:
        requests = [part.request for part in parts]
        sequences = [request.sequence for request in requests if request.sequence is not None]
        if not sequences:
            return None
        return recorded.logits(sequences, [request.text.ids[-1] for request in requests])

    def _evaluate_next(self, parts: Sequence[Part]) -> list[tuple[Part, Array]] | None:
        """A step of generated tokens, if they are like those before but for their positions."""
        pieces = list[tuple[CachedSequence, Sequence[int]]]()
        for part in parts:
            request = part.request
            if part.n_tokens != 1 or not request.is_decoding:
                return None
            assert request.sequence is not None
            pieces.append((request.sequence, (request.text.ids[-1], *part.drafts)))
        logits = self._next.logits(pieces)
        if logits is None:
            return None
        ends, end = list[tuple[Part, Array]](), 0
        for part in parts:
            start, end = end, end + part.n_rows
            ends.append((part, logits[start:end]))
        return ends

    def _evaluate_batch(self, parts: Sequence[Part]) -> list[tuple[Part, Array]]:
        pieces, generated, wanted = [], [], list[Wanted]()
        ends, n_rows = list[tuple[Part, int]](), 0
        for part in parts:
            request, drafts = part.request, part.drafts
            assert request.sequence is not None
            at = request.n_held
            ids = request.text.ids[at : at + part.n_tokens]
            pieces.append((request.sequence, [*ids, *drafts]))
            generated.append(at >= request.n_prompt)
            is_end = part.n_tokens == request.n_missing
            wanted.append("none" if not is_end else "all" if drafts else "last")
            if is_end:
                n_rows += part.n_rows if drafts else 1
                ends.append((part, n_rows))
        cache, model = self.slot.cache, self.slot.model
        batch = cache.batch(pieces, logits=wanted, generated=generated)
        with model.backend.arrays.inference():
            logits = model.forward(batch, cache)
        if all(generated) and len(logits) == batch.starts[-1]:
            self._next.note([sequence for sequence, _ in pieces], batch)
        return [(part, logits[end - 1 - len(part.drafts) : end]) for part, end in ends]
