"""Decoding several sequences from buffers that stay where they are, so that a GPU can repeat it.

As `DecodeLoop`, but a step takes a token of each of several sequences and yields logits. It is
recorded once for each number of sequences, rounded up to a power of two, and number of pages. What
is too much repeats the last sequence: it stores the same rows in the same places once more.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from localkv.cache.arrays import Array, Step
from localkv.cache.batch import Batch
from localkv.cache.kv_cache import KVCache
from localkv.cache.pages import Sequence
from localkv.engine.slot.bucket_key import BucketKey, bucket_key
from localkv.engine.slot.decode_loop import fixed_parts, place
from localkv.model import Transformer


@dataclass
class Recorded:
    """The steps of a number of sequences and of pages.

    Attributes:
        batch: the model's input; its tensors are written to in place.
        rows: what `Transformer.rows_of` gave, or None.
        pages, exact_from: of each part and sequence, what its table was filled with.
        run: launches the kernels of a step: float32 [sequences, n_vocab].
        step: does the same, recorded; None before the first.
    """

    batch: Batch
    rows: Array | None
    pages: list[list[list[int]]]
    exact_from: list[list[int]]
    run: Step
    step: Step | None = None


class RecordedBatches:
    """Decodes sequences of a cache, a token of each at a time.

    Args:
        model: on a backend whose launches can be recorded.
        cache: whose sequences are decoded.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.arrays = model.backend.arrays
        self._recorder = self.arrays.recorder()
        self._recorded = dict[tuple[int, BucketKey], Recorded]()

    def logits(self, sequences: Seq[Sequence], tokens: Seq[int]) -> Array | None:
        """Logits after a token of each sequence: float32 [sequences, n_vocab], valid until the next
        step. The sequences' lengths stay as they are.

        Returns:
            None if their rows are not all stored alike, as at the end of a sink, or in a cache with
            a budget, whose pages' types differ from text to text: then a batch like any other does
            it.

        Raises:
            LocalKVError: a token does not fit the context.
        """
        if self.cache.ladder is not None:
            return None
        keys = [bucket_key(self.cache, sequence.length) for sequence in sequences]
        if len({key.stores for key in keys}) > 1:
            return None
        n = len(sequences)
        padded = n if self.cache.states else 1 << (n - 1).bit_length()
        several = [*sequences, *([sequences[-1]] * (padded - n))]
        ids = [*tokens, *([tokens[-1]] * (padded - n))]
        for sequence in sequences:
            at = sequence.length
            self.cache.reserve(sequence, at + 1)
            self.cache.states.step(sequence, at, at + 1)
        key = padded, keys[0]._replace(n_pages=max(key.n_pages for key in keys))
        if key not in self._recorded:
            position = max(sequence.length for sequence in sequences)
            self._recorded[key] = self._new(key, position)
        recorded = self._recorded[key]
        self._fill(recorded, several, ids)
        if recorded.step is None:  # it is run for that, so its tables must be right
            states = () if self.cache.states.data is None else (self.cache.states.data,)
            recorded.step = self._recorder.record(recorded.run, states)
        return recorded.step()[:n]

    def _fill(self, recorded: Recorded, sequences: Seq[Sequence], tokens: Seq[int]) -> None:
        write, batch = self.arrays.write, recorded.batch
        write(batch.token_ids, tokens)
        write(batch.positions, [sequence.length for sequence in sequences])
        write(batch.slots, [sequence.slot for sequence in sequences])
        if recorded.rows is not None:
            recorded.rows[:] = self.model.rows_of(np.array(tokens))
        for i, (rows, part) in enumerate(zip(self.cache.parts, batch.segments, strict=True)):
            for k, sequence in enumerate(sequences):
                wanted = sequence.pages[rows.pool][: part.page_table.shape[1]]
                if recorded.pages[i][k] != wanted:
                    recorded.pages[i][k] = []  # should an exception come now
                    write(part.page_table[k], wanted)
                    recorded.pages[i][k] = wanted
            if part.exact_table is not None:
                exact_from = [rows.exact_from(sequence) for sequence in sequences]
                if recorded.exact_from[i] != exact_from:
                    recorded.exact_from[i] = []
                    write(part.exact_table, exact_from)
                    recorded.exact_from[i] = exact_from

    def _new(self, key: tuple[int, BucketKey], position: int) -> Recorded:
        n, bucket = key
        arrays, starts = self.arrays, list(range(n + 1))
        batch = Batch(
            token_ids=arrays.int64([0] * n),
            positions=arrays.int64([position] * n),
            starts=tuple(starts),
            start_table=arrays.int32(starts),
            segments=fixed_parts(self.cache, position, bucket, n),
            logit_rows=arrays.int64(list(range(n))),
            generated=(True,) * n,
            slots=arrays.int64([0] * n),
        )
        rows = self.model.rows_of(np.zeros(n, np.int64))

        def run() -> Array:
            with arrays.inference():
                place(self.cache, batch.segments, batch.positions)
                return self.model.forward(batch, self.cache, rows)

        parts = len(self.cache.parts)
        return Recorded(
            batch,
            rows,
            [[[] for _ in range(n)] for _ in range(parts)],
            [[] for _ in range(parts)],
            run,
        )
