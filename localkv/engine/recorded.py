"""Steps of generated tokens that are like a step before, run without making a batch again.

`DecodeLoop` decodes from buffers that stay where they are, so that a GPU can repeat a step without
the host. `NextTokens` runs a batch that was noted before from ids and positions alone, on a CPU.

A step takes a token of each of some sequences, stores its K and V, and yields logits or, with a
draw, the next token. It reads positions, page tables and the tokens from the device's memory. With
a draw it leaves them ready for the next step. On a GPU it is recorded once per `Bucket` as a CUDA
graph: then a token costs one launch, and the host reads a token while the next is computed.
Elsewhere the same function runs.

Steps of several sequences are recorded for each number of sequences, rounded up to a power of two.
The last sequence fills what is too much: its rows are stored in the same places once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from localkv.cache.arrays import Array, Batch, Draw, Readback, SegmentBatch, Step
from localkv.cache.kv_cache import KVCache, SteadyRows
from localkv.cache.ladder import lowering_order
from localkv.cache.ladder_pool import LadderPool, RungPages, rung_pages
from localkv.cache.layout import DECODED_AT_ONCE, PAGE_TOKENS, pages_for
from localkv.cache.pages import Sequence
from localkv.kernels.backend import Guessed, Guessing
from localkv.model import Transformer


class BucketKey(NamedTuple):
    """What steps have in common.

    Attributes:
        stores: of each part of a batch, whether new rows are stored in it.
        n_pages: of the longest part, as a power of two.
        empty: of each part, whether it is a rung of a ladder on which there is no page.
    """

    stores: tuple[bool, ...]
    n_pages: int
    empty: tuple[bool, ...]


def bucket_key(cache: KVCache, position: int, rungs: Seq[int] = ()) -> BucketKey:
    """The steps that a token at `position` takes part in, as a key.

    Args:
        rungs: in a cache with a budget the rungs of the sequence's pages, up to the token's own.
    """
    growing = [rows for rows in cache.parts if rows.grows_at(position)]
    n_pages = max(pages_for(position + 1 - rows.first) for rows in growing)
    stores = (
        rows.stores_at(position) and (rows.rung is None or rows.rung == rungs[-1])
        for rows in cache.parts
    )
    empty = (rows.rung is not None and rows.rung not in rungs for rows in cache.parts)
    return BucketKey(tuple(stores), 1 << (n_pages - 1).bit_length(), tuple(empty))


def grown_keys(cache: KVCache, ladder: LadderPool) -> Iterator[tuple[BucketKey, int]]:
    """The keys of a text that grows within a budget, in turn, and positions that have them.

    Between two pages those before go down one after the other.
    """
    found = set[BucketKey]()
    n_pages = pages_for(cache.n_ctx)
    grown = [rungs for rungs in ladder.sizes.growth(n_pages) if rungs is not None]
    for rungs, then in pairwise([*grown, *grown[-1:]]):
        position = min(len(rungs) * PAGE_TOKENS, cache.n_ctx) - 1
        for now in _lowered(rungs, then):
            key = bucket_key(cache, position, now)
            if key not in found:
                found.add(key)
                yield key, position


def _lowered(rungs: Seq[int], then: Seq[int]) -> Iterator[list[int]]:
    """The rungs of pages as they go down to where they are `then`, page by page."""
    now = list(rungs)
    while True:
        yield now
        left = [place for place, rung in enumerate(now) if rung < then[place]]
        if not left:
            return
        now[min(left, key=lambda place: lowering_order(now[place], place))] += 1


MANY_DRAWS = 8
"""Ways to draw whose recordings are kept."""


@dataclass(frozen=True)
class Inputs:
    """What steps of a number of sequences read, and write if they draw.

    Attributes:
        tokens, positions, slots: int64 [sequences].
        rows: what `Transformer.rows_of` gave, or None.
    """

    tokens: Array
    positions: Array
    slots: Array
    rows: Array | None


@dataclass
class Bucket:
    """The steps of contexts of a number of pages: one grid and one set of buffers.

    Attributes:
        inputs: of as many sequences as the steps have.
        batch: the model's input; its tensors are written to in place.
        pages: of each part and sequence, the ids that its page table was filled with.
        exact_from: of each part and sequence, as its table has it.
        rows: of each part that is a rung of a ladder, how many are in pages that stay full, and the
            position of row 0, as its tables have them.
        steps: by draw (None for logits), the function that runs a step.
    """

    inputs: Inputs
    batch: Batch
    pages: list[list[list[int]]]
    exact_from: list[list[int]]
    rows: list[tuple[int, int] | None]
    steps: dict[Draw | None, Step] = field(default_factory=dict)


class DecodeLoop:
    """Decodes sequences of a cache, a token of each at a time.

    Args:
        model: on a backend whose launches can be recorded.
        cache: whose sequences are decoded.
        records: on a GPU steps are recorded; else they are launched each time.
    """

    def __init__(self, model: Transformer, cache: KVCache, *, records: bool = True) -> None:
        self.model = model
        self.cache = cache
        self.records = records
        self.arrays = model.backend.arrays
        self._recorder = self.arrays.recorder()
        self._buckets = dict[tuple[int, BucketKey], Bucket]()
        self._inputs = dict[int, Inputs]()
        self._random = self.arrays.int64([0, 0])
        self._states = [part.data for part in cache.states.parts]
        self._draws: list[Draw] = []

    def warm_up(self, sequence: Sequence) -> None:
        """Record the steps of every bucket of one sequence, so that none is recorded while a user
        waits.

        The sequence must be empty, and is so again afterwards.
        """
        if self.cache.ladder is not None:
            self._warm_up_ladder(self.cache.ladder, sequence)
            self.cache.truncate(sequence, 0)
            return
        position = 0
        while position < self.cache.n_ctx:
            sequence.length = sequence.n_stepped = position
            self.logits([sequence], [0])
            position = self._next_key(position)
        self.cache.truncate(sequence, 0)

    def _warm_up_ladder(self, ladder: LadderPool, sequence: Sequence) -> None:
        """Record the steps of a text that grows within the budget; all rows are in one page
        meanwhile."""
        self.cache.reserve(sequence, 1, 0)
        self.cache.states.step(sequence, 0, 1)
        pages = [held[0] for held in sequence.pages]
        page, pages[ladder.index] = pages[ladder.index], ladder.place(pages[ladder.index])
        for key, position in grown_keys(self.cache, ladder):
            bucket = self._bucket(1, key, position)
            self._write_inputs(bucket, [sequence], [0], [0])
            for i, (rows, part) in enumerate(
                zip(self.cache.parts, bucket.batch.segments, strict=True)
            ):
                width = part.page_table.shape[1]
                self.arrays.write(part.page_table[0], [pages[rows.pool]] * width)
                bucket.pages[i][0], bucket.rows[i] = [], None
            self._step(bucket, None)()
        for rung in range(ladder.rungs[page], len(ladder.sizes.units) - 1):
            self.cache.repack_page(rung, pages[ladder.index])

    def _next_key(self, position: int) -> int:
        """The first position after this one that has another key."""
        width = bucket_key(self.cache, position).n_pages
        later = {rows.begin for rows in self.cache.parts if rows.begin > position}
        growing = (rows for rows in self.cache.parts if rows.grows_at(position))
        return min(later | {rows.first + width * PAGE_TOKENS for rows in growing})

    def logits(self, sequences: Seq[Sequence], tokens: Seq[int]) -> Array | None:
        """Logits after a token of each sequence: float32 [sequences, n_vocab].

        The sequences' lengths stay as they are. The result is valid until the next step.

        Returns:
            None if several sequences don't store their rows alike, as at the end of a sink. None,
            too, if the cache has a budget, where the types of pages differ from text to text. Then
            a batch like any other does it. One sequence always has logits.

        Raises:
            LocalKVError: a token does not fit the context.
        """
        n = len(sequences)
        positions = [sequence.length for sequence in sequences]
        bucket = self._place(sequences, positions)
        if bucket is None:
            return None
        n_filled = len(bucket.batch.generated) - n
        several = [*sequences, *([sequences[-1]] * n_filled)]
        self._write_inputs(
            bucket,
            several,
            [*tokens, *([tokens[-1]] * n_filled)],
            [*positions, *([positions[-1]] * n_filled)],
        )
        return self._step(bucket, None)()[:n]

    def tokens(
        self, sequence: Sequence, token: int, draw: Draw, *, seed: int, number: int, limit: int
    ) -> Iterator[int]:
        """The next tokens, each drawn on the device from the logits after the last.

        While one is on its way to the host the next is computed, so a reader who stops leaves one
        more row in the cache than tokens. The caller sets the sequence's length, at any time.
        States of recurrent layers can't be cut back, so there the next waits until it is asked for.

        Args:
            sequence: as it is when the first token is asked for.
            token: the first one whose K and V are not stored yet.
            draw: how tokens are drawn (`Transformer.draw`).
            seed, number: of the first draw; the following ones count on.
            limit: tokens to draw at most; the context must have room for as many rows.

        Raises:
            LocalKVError: they do not fit the context.
        """
        first = sequence.length
        self.arrays.write(self._random, [seed, number])
        waiting: Readback | None = None
        is_ladder = self.cache.ladder is not None
        for position in range(first, first + limit):
            if waiting is not None and is_ladder and position % PAGE_TOKENS == 0:
                yield waiting.value()  # once it is counted the page before is full, and may change
                waiting = None
            bucket = self._place([sequence], [position], ahead=waiting is not None)
            assert bucket is not None
            if position == first:
                self._write_inputs(bucket, [sequence], [token], [position])
            arriving = self.arrays.read_back(self._step(bucket, draw)())
            if self.cache.states:
                yield arriving.value()
                continue
            if waiting is not None:
                yield waiting.value()
            waiting = arriving
        if waiting is not None:
            yield waiting.value()

    def _write_inputs(
        self, bucket: Bucket, sequences: Seq[Sequence], tokens: Seq[int], positions: Seq[int]
    ) -> None:
        write, inputs = self.arrays.write, bucket.inputs
        write(inputs.tokens, tokens)
        write(inputs.positions, positions)
        if self.cache.states:
            write(inputs.slots, [self.cache.states.place(sequence) for sequence in sequences])
        if inputs.rows is not None:
            inputs.rows[:] = self.model.rows_of(np.array(tokens))

    def _place(
        self, sequences: Seq[Sequence], positions: Seq[int], *, ahead: bool = False
    ) -> Bucket | None:
        """The bucket for a token of each sequence at a position, its page tables filled.

        Args:
            ahead: a token before it is on its way to the host.

        Returns:
            None if several sequences can't have one together.
        """
        ladder, n = self.cache.ladder, len(sequences)
        if n > 1 and ladder is not None:
            return None
        if n > 1 and len({bucket_key(self.cache, at).stores for at in positions}) > 1:
            return None
        rungs = list[int]()
        for sequence, position in zip(sequences, positions, strict=True):
            # the reader may not have counted the row before, and stop there
            first = max(0, position + 1 - DECODED_AT_ONCE) if ahead else position
            self.cache.reserve(sequence, position + 1, first)
            self.cache.states.step(sequence, position, position + 1)
            if ladder is not None:
                pages = sequence.pages[ladder.index][: position // PAGE_TOKENS + 1]
                rungs = [ladder.rungs[page] for page in pages]
        keys = [bucket_key(self.cache, position, rungs) for position in positions]
        key = keys[0]._replace(n_pages=max(key.n_pages for key in keys))
        padded = n if self.cache.states else 1 << (n - 1).bit_length()
        bucket = self._bucket(padded, key, max(positions))
        several = [*sequences, *([sequences[-1]] * (padded - n))]
        for i, (rows, part) in enumerate(zip(self.cache.parts, bucket.batch.segments, strict=True)):
            if ladder is not None and rows.rung is not None:
                position, pages = positions[0], sequences[0].pages[rows.pool]
                found = rung_pages(ladder, rows.rung, pages, position, position + 1)
                self._place_rows(bucket, i, part, found)
                self._write_pages(bucket, i, 0, part, found.places)
            else:
                width = part.page_table.shape[1]
                for k, sequence in enumerate(several):
                    self._write_pages(bucket, i, k, part, sequence.pages[rows.pool][:width])
            if part.exact_table is not None:
                exact_from = [rows.exact_from(sequence) for sequence in several]
                if bucket.exact_from[i] != exact_from:
                    bucket.exact_from[i] = []
                    self.arrays.write(part.exact_table, exact_from)
                    bucket.exact_from[i] = exact_from
        return bucket

    def _write_pages(
        self, bucket: Bucket, i: int, k: int, part: SegmentBatch, wanted: list[int]
    ) -> None:
        """Fill the page table of a part and a sequence, if it has others."""
        if bucket.pages[i][k] != wanted:
            bucket.pages[i][k] = []  # should an exception come now
            self.arrays.write(part.page_table[k], wanted)
            bucket.pages[i][k] = wanted

    def _place_rows(self, bucket: Bucket, i: int, part: SegmentBatch, found: RungPages) -> None:
        """Fill the tables of a rung's rows; a step itself counts those that it adds to."""
        wanted = 0 if found.grows else found.n_rows, found.first
        if bucket.rows[i] != wanted:
            bucket.rows[i] = None
            n_rows, first = wanted
            self.arrays.write(part.length_table, [n_rows])
            self.arrays.write(part.first_table, [first])
            bucket.rows[i] = wanted

    def _bucket(self, n: int, key: BucketKey, position: int) -> Bucket:
        """The bucket of `n` sequences.

        Args:
            position: of a token that it is for.
        """
        found = self._buckets.get((n, key))
        if found is None:
            found = self._buckets[n, key] = self._new_bucket(n, key, position)
        return found

    def _new_bucket(self, n: int, key: BucketKey, position: int) -> Bucket:
        arrays, starts = self.arrays, list(range(n + 1))
        if n not in self._inputs:
            zeros = [0] * n
            self._inputs[n] = Inputs(
                arrays.int64(zeros),
                arrays.int64(zeros),
                arrays.int64(zeros),
                self.model.rows_of(np.array(zeros)),
            )
        inputs = self._inputs[n]
        parts = fixed_parts(self.cache, position, key, n)
        batch = Batch(
            token_ids=inputs.tokens,
            positions=inputs.positions,
            starts=tuple(starts),
            start_table=arrays.int32(starts),
            segments=parts,
            logit_rows=arrays.int64(list(range(n))),
            generated=(True,) * n,
            slots=inputs.slots,
            after=inputs.slots,
        )
        pages = [[list[int]() for _ in range(n)] for _ in parts]
        return Bucket(inputs, batch, pages, [[] for _ in parts], [None] * len(parts))

    def _step(self, bucket: Bucket, draw: Draw | None) -> Step:
        if draw not in bucket.steps:
            if draw is not None and draw not in self._draws:
                self._draws.append(draw)
                if len(self._draws) > MANY_DRAWS:
                    forgotten = self._draws.pop(0)
                    for other in self._buckets.values():
                        other.steps.pop(forgotten, None)
            bucket.steps[draw] = self._record(bucket.inputs, lambda: self._run(bucket, draw))
        return bucket.steps[draw]

    def _run(self, bucket: Bucket, draw: Draw | None) -> Array:
        inputs = bucket.inputs
        with self.arrays.inference():
            place(self.cache, bucket.batch.segments, inputs.positions)
            logits = self.model.forward(bucket.batch, self.cache, inputs.rows)
            if draw is None:
                return logits
            inputs.tokens[:] = draw(logits, self._random)
            inputs.positions.add_(1)
            self._random[1].add_(1)
            return inputs.tokens

    def _record(self, inputs: Inputs, step: Step) -> Step:
        """What repeats `step`; nothing has changed when this returns."""
        if not self.records:
            return step
        changed = (inputs.tokens, inputs.positions, self._random, *self._states)
        return self._recorder.record(step, changed)


def fixed_parts(cache: KVCache, position: int, key: BucketKey, n: int) -> tuple[SegmentBatch, ...]:
    """The parts of a batch of a token of `n` sequences each, to be written to in place: tables of
    as many pages as the bucket has.

    Args:
        position: of a token that the bucket is for.
    """
    parts, arrays = [], cache.arrays
    for rows, n_new, is_empty in zip(cache.parts, key.stores, key.empty, strict=True):
        n_rows = 0 if is_empty or position < rows.begin else rows.end - rows.first
        if rows.grows_at(position):
            n_rows = min(pages_for(n_rows), key.n_pages) * PAGE_TOKENS
        tail = rows.spec.tail
        parts.append(
            SegmentBatch(
                page_table=arrays.int64([[0] * max(1, pages_for(n_rows))] * n),
                lengths=(n_rows,) * n,
                length_table=arrays.int32([n_rows] * n),
                first_position=rows.first,
                tokens=arrays.int64(list(range(n)) if n_new else []),
                slots=arrays.int64([0] * n if n_new else []),
                tail=tail,
                is_tail=rows.spec.is_tail,
                exact_from=(0,) * n if tail else (),
                exact_table=arrays.int64([0] * n) if tail else None,
                groups=None if rows.spec.stores_at_once else arrays.int64([[-1, -1]] * n),
                first_table=None if rows.rung is None else arrays.int64([0] * n),
                is_empty=is_empty,
            )
        )
    return tuple(parts)


def place(cache: KVCache, parts: tuple[SegmentBatch, ...], position: Array) -> None:
    """Set the new rows of the parts to those that the tokens at `position`, int64 [n], take.

    Nothing asks the host, so that this can be recorded.
    """
    for i, part in enumerate(parts):
        if len(part.slots):
            cache.arrays.place_row(part, position)
        elif part.groups is not None:  # the tail is the next segment
            cache.arrays.place_group(part, parts[i + 1], position)


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
