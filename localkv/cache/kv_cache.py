"""The paged KV cache: where packed rows of K and V live, and which rows belong to which sequence.

A *group* is the layers whose rows are alike. A *page* holds `PAGE_TOKENS` rows of every layer of a
group. A *segment* is a range of token positions that is stored in one pair of types; the newest
positions are stored once more, in a *tail*. A *sequence* owns page ids and a length. The cache
moves bytes about and knows nothing of what the formats mean beyond their planes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import CacheGroup, LayerState
from localkv.cache.arrays import (
    Array,
    Arrays,
    Batch,
    LayerCache,
    Segment,
    SegmentBatch,
    Wanted,
    row_fields,
    wanted_rows,
)
from localkv.cache.ladder import stores_rows
from localkv.cache.ladder_pool import LadderPool, LadderRows, Planes, Requantised, rung_batch
from localkv.cache.layout import (
    DECODED_AT_ONCE,
    PAGE_TOKENS,
    CodebookUse,
    GroupLayout,
    PoolLayout,
    SegmentSpec,
    group_bytes,
    uniform_layouts,
)
from localkv.cache.pages import NO_SLOT, NoPageError, PagePool, SegmentRows, Sequence, segment_rows
from localkv.cache.profile import head_scales
from localkv.cache.recurrent_state import CheckpointConfig, RecurrentStates
from localkv.cache.repack import repack_page
from localkv.config import KVCodebook, KVScales
from localkv.errors import LocalKVError
from localkv.quant_formats import FORMATS
from localkv.quant_formats.shared.codebooks import NORMAL, table_of


class KVCache:
    """Packed K and V of all layers, for `n_sequences` sequences of `n_ctx` tokens.

    Args:
        layouts: the model's groups of layers, and how their rows are stored: in segments of the
            same positions.
        n_ctx: tokens that one sequence can hold.
        n_batch: most tokens of a sequence in a batch. How many rows layers with a window have to
            keep depends on it. None is no limit, so that they keep all.
        n_sequences: sequences that fit at the same time.
        n_tokens: tokens that they have together at most; None for `n_ctx` each.
        arrays: where the pages live, and what batches are made of.
        layer_arrays: of each layer, where its pages live; None for `arrays`.
        kv_scales: for types that are scaled by head; without it their scales are 1. Their bytes
            are not counted.
        kv_codebooks: for types with codebooks; their bytes are not counted either.
        states: the model's recurrent layers.
        checkpoints: of their states.
        n_between: as `RecurrentStates` has it.

    Attributes:
        pools: pages of the segments; groups whose pages come and go together share them.
        parts: the segments of groups, in the order of `Batch.segments`; such groups share them.
        layers: in the model's order; those without rows of their own have no segments.
        arrays_of: of a layer, where its pages and states live.
        states: of the recurrent layers; false if there are none.
        ladder: the pool of pages that change their types, or None.
        codebooks: the codebooks that layers use, and where each comes from.
        n_started_over: how often all sequences were emptied (`start_over`).
        adapters: names of the model's adapters, by which states know them.
        scales: of these, of a new sequence.
    """

    def __init__(
        self,
        layouts: Seq[GroupLayout],
        *,
        n_ctx: int,
        arrays: Arrays,
        layer_arrays: Seq[Arrays] | None = None,
        n_batch: int | None = None,
        n_sequences: int = 1,
        n_tokens: int | None = None,
        kv_scales: KVScales | None = None,
        kv_codebooks: Seq[KVCodebook] = (),
        states: Seq[LayerState] = (),
        checkpoints: CheckpointConfig | None = None,
        n_between: int = 0,
    ) -> None:
        self.layouts = tuple(layouts)
        self.n_ctx = n_ctx
        self.n_sequences = n_sequences
        self.n_batch = n_ctx if n_batch is None else n_batch
        self.arrays = arrays
        self.arrays_of: Callable[[int], Arrays] = (
            (lambda layer: arrays) if layer_arrays is None else layer_arrays.__getitem__
        )
        new = LayerArrays(self.arrays_of, kv_scales, kv_codebooks)
        self.codebooks = new.codebooks
        keeper = weakref.proxy(self)
        self.pools = list[PagePool]()
        self.parts = list[SegmentRows]()
        self.ladder: LadderPool | None = None
        self._arenas: LadderRows | None = None
        self._on_full: Callable[[], Callable[[], bool] | None] = lambda: None
        self._sequences = list[weakref.ref[Sequence]]()
        self.n_started_over = 0
        self.adapters: tuple[str, ...] = ()
        self.scales: tuple[float, ...] = ()
        layers = dict[int, LayerCache]()
        first_parts = dict[object, int]()
        for layout in self.layouts:
            if layout.paging not in first_parts:
                first_parts[layout.paging] = len(self.parts)
                self.parts += segment_rows(layout, n_ctx, len(self.pools))
                for pool in layout.pools(n_ctx, n_batch):
                    if layout.budget is not None:
                        self._add_ladder(layout, pool)
                        continue
                    n_pages = pool.n_pages(n_sequences, n_tokens)
                    self.pools.append(PagePool(len(self.pools), layout, pool, n_pages, keeper))
            first = first_parts[layout.paging]
            parts = self.parts[first : first + len(layout.segments)]
            for layer in layout.group.layers:
                segments = new.segments(layer, layout, parts, self.pools, self._arenas)
                layers[layer] = LayerCache(segments, first)
        self._gives_back = any(layout.reach for layout in layouts) or any(
            pool.tail for pool in self.pools
        )
        self.states = RecurrentStates(
            states,
            arrays=self.arrays_of,
            n_sequences=n_sequences,
            config=checkpoints or CheckpointConfig(),
            n_between=n_between,
            make_room=lambda: keeper.make_room(),
        )
        for i, state in self.states.layers.items():
            layers[i] = replace(layers.get(i, LayerCache(())), state=state)
        self.layers = [layers.get(i, LayerCache(())) for i in range(1 + max(layers, default=-1))]

    def _add_ladder(self, layout: GroupLayout, pool: PoolLayout) -> None:
        if self.ladder is not None:
            raise ValueError("a cache has one group of layers with a budget")
        sizes = layout.ladder(self.n_ctx, self.n_sequences)
        keeper = weakref.proxy(self)
        self.ladder = LadderPool(len(self.pools), layout, pool, keeper, sizes)
        self.pools.append(self.ladder)
        self._arenas = LadderRows(self.arrays_of, layout, sizes)

    def n_bytes(self, side: Literal["k", "v"]) -> int:
        """Bytes allocated for K or for V; of a ladder's arenas K's share on the first rung."""
        planes = {
            id(plane): plane.nbytes
            for layer in self.layers
            for rows, segment in zip(self.parts[layer.part :], layer.segments, strict=False)
            if rows.rung is None
            for plane in getattr(segment, side)
        }
        total: int = sum(planes.values())
        if self.ladder is not None:
            of_k, of_v = group_bytes(
                self.ladder.layout, n_ctx=self.n_ctx, n_sequences=self.n_sequences
            )
            total += of_k if side == "k" else of_v
        return total

    def new_sequence(self, *, stepped: bool = True) -> Sequence:
        """An empty sequence; it takes pages as tokens come.

        Args:
            stepped: it has a place for the states of recurrent layers; else it takes one with its
                first batch.
        """
        sequence = Sequence(len(self.pools), slot=NO_SLOT, scales=self.scales)
        if stepped:
            sequence.slot = self.states.free_slot(self.known())
        self._sequences.append(weakref.ref(sequence))
        return sequence

    def known(self) -> list[Sequence]:
        """All sequences that there are."""
        self._sequences = [known for known in self._sequences if known() is not None]
        return [other for ref in self._sequences if (other := ref()) is not None]

    def fork(self, sequence: Sequence, length: int, *, exactly: bool = False) -> Sequence:
        """A sequence of the first `length` tokens of another, or as many of them as it can be cut
        back to (`cut_back`). They share pages; the other one stays as it is.
        """
        other = self.new_sequence()
        other.copy_places(sequence)
        for pool in self.pools:
            pool.share(other.held(pool.index))
        self.states.copy(sequence, other)
        self.cut_back(other, length, exactly=exactly)
        return other

    def retire(self, sequence: Sequence) -> None:
        """Keep a sequence only to be forked, and give its states' place to other sequences."""
        self.states.give_back(sequence)

    def start_over(self, sequences: Iterable[Sequence]) -> None:
        """Forget all tokens, whatever state an exception between two instructions has left.

        Args:
            sequences: all that anybody uses. The exception's traceback may hold others, and they
                must not hold pages, nor places among the states.
        """
        used = {id(sequence) for sequence in sequences}
        for sequence in self.known():
            sequence.clear()
            if id(sequence) not in used:
                self.states.give_back(sequence)
        self._count_pages()
        self.n_started_over += 1

    def _count_pages(self) -> None:
        """Find out again which pages are free: those that no sequence holds."""
        known = self.known()
        for pool in self.pools:
            pool.count(known)

    def checkpoint(self, sequence: Sequence, *, exactly: bool = True) -> None:
        """Expect the sequence to be cut back to where it is now: keep what that takes.

        It is a wish: without room for it, it is not heeded. Of the pages of layers with a window a
        sequence has one at a time.

        Args:
            exactly: keep states here even if there are some of a few tokens ago.
        """
        sequence.checkpoint = sequence.length
        if exactly or not self.states.is_near(sequence):
            self.states.keep(sequence)

    def cut_back(self, sequence: Sequence, length: int, *, exactly: bool = False) -> int:
        """Forget all tokens from position `length` on.

        Tokens before it are forgotten, too, until all rows are there that the next token sees, and
        the states of recurrent layers. The pages of what is forgotten are given back.

        Args:
            exactly: the tail's rows have to be there, too. Then text goes on with the bits that it
                would have if it had never been longer. Else rows that a tail has lost are read
                packed.

        Returns:
            the sequence's length now: at most `length`, and 0 if too much was given back.
        """
        length = self.reachable(sequence, length, exactly=exactly)
        sequence.length = sequence.cut_to = length
        sequence.checkpoint = min(sequence.checkpoint, length)
        for pool in self.pools:
            pool.cut(sequence, length)
        self.states.cut(sequence, length)
        return length

    def reachable(self, sequence: Sequence, length: int, *, exactly: bool = False) -> int:
        """The largest length up to `length` that a sequence can be cut back to (`cut_back`)."""
        length = min(length, sequence.length)
        while True:
            gaps = (pool.gap(sequence, length, exactly=exactly) for pool in self.pools)
            first = min((gap for gap in gaps if gap is not None), default=length)
            first = self.states.reachable(sequence, first)
            if first == length:
                return length
            length = first

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget all tokens from position `length` on, and give their pages back.

        Raises:
            ValueError: rows that the next token would see are no longer there, or no states
                (`cut_back`).
        """
        length = min(length, sequence.length)
        if self.reachable(sequence, length) < length:
            raise ValueError(f"the rows before position {length} are gone")
        self.cut_back(sequence, length)

    def reserve(self, sequence: Sequence, length: int, position: int | None = None) -> None:
        """Take the pages that a sequence of `length` tokens needs, and give back others that it
        needs no more, if there is no room for both.

        Args:
            position: of the first token that is still to be evaluated; None for the one after the
                sequence's.

        Raises:
            LocalKVError: a sequence would grow beyond the context, or by more than a batch, or no
                page is free.
        """
        position = sequence.length if position is None else position
        if length > self.n_ctx:
            raise LocalKVError(f"{length} tokens do not fit the context of {self.n_ctx}")
        if self._gives_back and (n_new := length - position) > max(self.n_batch, DECODED_AT_ONCE):
            raise LocalKVError(f"{n_new} tokens do not fit a batch of {self.n_batch}")
        try:
            for pool in self.pools:
                pool.reserve(sequence, length, position)
        except NoPageError:
            raise
        except BaseException:  # perhaps after a page was taken, and before the sequence has it
            self._count_pages()
            raise

    def may_guess(self, sequence: Sequence, n_tokens: int, n_guesses: int) -> bool:
        """Whether guesses after a sequence's next tokens leave the rows that these see unchanged.

        With a budget, a row that begins a page sends other pages down a rung, and the next tokens
        would see that.
        """
        if self.ladder is None:
            return True
        end = sequence.length + n_tokens
        return self.ladder.n_places(end + n_guesses) == self.ladder.n_places(end)

    def call_when_full(self, make_room: Callable[[], bool]) -> None:
        """Have a method called when no page of a pool is free, as long as its object is there.

        Args:
            make_room: whether a sequence that was only kept to be forked has given pages back.
        """
        self._on_full = weakref.WeakMethod(make_room)

    @property
    def requantised(self) -> Requantised:
        """Pages whose types have changed so far."""
        return Requantised() if self.ladder is None else replace(self.ladder.requantised)

    def make_room(self) -> bool:
        """Have pages given back that can be spared; whether some were."""
        make_room = self._on_full()
        return make_room is not None and make_room()

    def copy_page(self, pool: int, source: int, target: int) -> None:
        """Give a page of a pool the rows of another."""
        if self.pools[pool] is self.ladder and self._arenas is not None:
            n = self.ladder.sizes.units[self.ladder.rungs[source]]
            self._arenas.copy(n, self.ladder.place(source), self.ladder.place(target))
            return
        for plane in self._planes(pool):
            plane[target] = plane[source]

    def move_run(self, n: int, first: int, to: int) -> None:
        """Move units of a ladder's arenas."""
        assert self._arenas is not None
        self._arenas.move(n, first, to)

    def repack_page(self, rung: int, place: int) -> None:
        """Pack a page of a ladder as the next rung has it."""
        for arrays, layer in self._ladder_layers():
            source, target = layer.segments[rung : rung + 2]
            arrays.repack_page(source, target, place)

    def warm_up_ladder(self) -> None:
        """Load the code that repacks pages, so that no text waits for it. No page may be in use."""
        assert self.ladder is not None
        units = self.ladder.sizes.units
        each = {id(arrays): (arrays, layer) for arrays, layer in self._ladder_layers()}
        for rung, n_units in enumerate(units[:-1]):
            for arrays, layer in each.values() if n_units <= self.ladder.sizes.n_units else ():
                source, target = layer.segments[rung : rung + 2]
                arrays.repack_page(source, target, 0)

    def raise_page(self, rung: int, place: int, higher: int, to: int) -> None:
        """Pack a page of a ladder as a higher rung has it, at another place."""
        for arrays, layer in self._ladder_layers():
            source, target = layer.segments[rung], layer.segments[higher]
            repack_page(arrays, source, target, place, to)

    def _ladder_layers(self) -> list[tuple[Arrays, LayerCache]]:
        """The layers whose pages change their types, and where each is."""
        assert self.ladder is not None
        return [(self.arrays_of(i), self.layers[i]) for i in self.ladder.layout.group.layers]

    def clear_page(self, pool: int, page: int) -> None:
        """Make the rows of a page numbers."""
        for plane in self._planes(pool):
            plane[page] = 0

    def _planes(self, pool: int) -> Iterator[Array]:
        """Yield the planes that hold the pages of a pool, [pages, ...] each."""
        found = {
            id(plane): plane
            for layer in self.layers
            for rows, segment in zip(self.parts[layer.part :], layer.segments, strict=False)
            if rows.pool == pool
            for plane in (*segment.k, *segment.v)
        }
        yield from found.values()

    def batch(
        self,
        parts: Seq[tuple[Sequence, Seq[int]]],
        *,
        logits: Wanted | Seq[Wanted] = "last",
        generated: bool | Seq[bool] = False,
    ) -> Batch:
        """A batch that continues each sequence with the given token ids.

        Takes the pages that the new tokens need. The sequences' lengths stay as they are: whoever
        runs the batch adds to them afterwards.

        Args:
            parts: sequences and their new token ids (at least one each).
            logits: which are wanted: of all sequences, or said for each.
            generated: the new tokens were generated: of all sequences, or said for each.

        Raises:
            LocalKVError: a sequence would grow beyond the context, or no page is free.
        """
        starts, positions, after = [0], list[int](), list[int]()
        if isinstance(generated, bool):
            generated = (generated,) * len(parts)
        for (sequence, ids), is_generated in zip(parts, generated, strict=True):
            end = sequence.length + len(ids)
            self.reserve(sequence, end)
            if sequence.slot == NO_SLOT:
                sequence.slot = self.states.free_slot(self.known())
            if self.states:
                self.states.step(sequence, sequence.length, end, generated=is_generated)
                after += self.states.after(sequence, len(ids), generated=is_generated)
            starts.append(starts[-1] + len(ids))
            positions += range(sequence.length, end)
        all_ids = [token for _, ids in parts for token in ids]
        wanted = [logits] * len(parts) if isinstance(logits, str) else logits
        return Batch(
            token_ids=self.arrays.int64(all_ids),
            positions=self.arrays.int64(positions),
            starts=tuple(starts),
            start_table=self.arrays.int32(starts),
            segments=tuple(self._segment_batch(rows, parts, starts) for rows in self.parts),
            logit_rows=self.arrays.int64(list(wanted_rows(starts, wanted))),
            generated=tuple(generated),
            slots=self.arrays.int64([self.states.place(sequence) for sequence, _ in parts]),
            after=self.arrays.int64(after),
            scales=_scales(parts),
        )

    def _segment_batch(
        self, rows: SegmentRows, parts: Seq[tuple[Sequence, Seq[int]]], starts: list[int]
    ) -> SegmentBatch:
        if rows.rung is not None:
            assert self.ladder is not None
            return rung_batch(rows, self.ladder, parts, starts, self.arrays)
        return segment_batch(rows, parts, starts, self.arrays)


def _scales(parts: Seq[tuple[Sequence, Seq[int]]]) -> NDArray[np.float32] | None:
    """The scales of adapters of a batch's tokens, see `Batch`."""
    if not any(any(sequence.scales) for sequence, _ in parts):
        return None
    n = max(len(sequence.scales) for sequence, _ in parts)
    each = [sequence.scales or (0.0,) * n for sequence, _ in parts]
    return np.repeat(np.array(each, np.float32), [len(ids) for _, ids in parts], axis=0)


class LayerArrays:
    """Allocates the arrays of a cache, layer by layer.

    Args:
        arrays: where they live, of each layer.
        kv_scales: for types that are scaled by head; without it their scales are 1.
        kv_codebooks: for types with codebooks; a layer without one takes the codebook of normal
            numbers.

    Attributes:
        codebooks: the codebooks that layers have taken so far.
    """

    def __init__(
        self,
        arrays: Callable[[int], Arrays],
        kv_scales: KVScales | None,
        kv_codebooks: Seq[KVCodebook],
    ) -> None:
        self.codebooks = list[CodebookUse]()
        self._arrays = arrays
        self._absmax_k = kv_scales.absmax_k if kv_scales else ()
        self._absmax_v = kv_scales.absmax_v if kv_scales else ()
        self._measured = {(b.layer, b.side, len(b.numbers)): b.numbers for b in kv_codebooks}

    def segments(
        self,
        layer: int,
        layout: GroupLayout,
        parts: Seq[SegmentRows],
        pools: Seq[PagePool],
        arenas: LadderRows | None,
    ) -> tuple[Segment, ...]:
        """Allocate the segments of a layer.

        Args:
            layout: of its group.
            parts: of its segments.
            pools: of the cache, in which these have their pages.
            arenas: of the rungs of a ladder.
        """
        group, made, found = layout.group, dict[int, Planes](), list[Segment]()
        for spec, rows in zip(layout.segments, parts, strict=True):
            if rows.rung is not None:
                assert arenas is not None
                made[rows.pool] = arenas.planes(layer, rows.rung)
            elif rows.pool not in made:
                n_pages = pools[rows.pool].n_pages
                k = self._planes(layer, spec.type_k, n_pages, group, group.key_dim)
                v = self._planes(layer, spec.type_v, n_pages, group, group.value_dim)
                made[rows.pool] = k, v
            found.append(
                Segment(
                    FORMATS[spec.type_k],
                    FORMATS[spec.type_v],
                    spec.rotation_k,
                    spec.rotation_v,
                    *made[rows.pool],
                    self._scales(spec.type_k, layer, group, self._absmax_k),
                    self._scales(spec.type_v, layer, group, self._absmax_v),
                    self._codebook(spec.type_k, layer, "k"),
                    self._codebook(spec.type_v, layer, "v"),
                    is_whole=rows.rung is not None and not stores_rows(spec.type_k, spec.type_v),
                )
            )
        return tuple(found)

    def _planes(
        self, layer: int, name: str, n_pages: int, group: CacheGroup, head_dim: int
    ) -> tuple[Array, ...]:
        rows = (n_pages, group.n_kv_heads, PAGE_TOKENS)
        fields = row_fields(FORMATS[name], head_dim)
        return tuple(self._arrays(layer).bytes((*rows, *field)) for field in fields)

    def _scales(
        self, name: str, layer: int, group: CacheGroup, absmax: Seq[Seq[float]]
    ) -> Array | None:
        if not FORMATS[name].scales_by_head:
            return None
        values = head_scales(absmax[layer], name) if absmax else [1.0] * group.n_kv_heads
        return self._arrays(layer).floats(values)

    def _codebook(self, name: str, layer: int, side: Literal["k", "v"]) -> Array | None:
        n = FORMATS[name].n_centroids
        if not n:
            return None
        measured = self._measured.get((layer, side, n))
        self.codebooks.append(CodebookUse(layer, side, name, measured is not None))
        return self._arrays(layer).from_numpy(table_of(measured or NORMAL[n]))


def segment_batch(
    rows: SegmentRows, parts: Seq[tuple[Sequence, Seq[int]]], starts: Seq[int], arrays: Arrays
) -> SegmentBatch:
    """A batch's part in a segment whose pages keep their types.

    Args:
        parts: sequences and their new token ids.
        starts: of each sequence the index of its first token in the batch.
        arrays: where the tables live.
    """
    lengths, tokens, slots = [], [], []
    groups, exact_from = list[tuple[int, int]](), list[int]()
    for (sequence, ids), start in zip(parts, starts, strict=False):
        end = sequence.length + len(ids)
        lengths.append(rows.n_seen(sequence, end))
        exact_from.append(rows.exact_from(sequence))
        groups += rows.new_groups(sequence, end)
        for position, slot in rows.new_slots(sequence, end):
            tokens.append(start + position - sequence.length)
            slots.append(slot)
    tables = [sequence.pages[rows.pool] for sequence, _ in parts]
    width = max(1, *(len(table) for table in tables)) if tables else 1
    padded = [table + [0] * (width - len(table)) for table in tables]
    tail = rows.spec.tail
    return SegmentBatch(
        page_table=arrays.int64(padded),
        lengths=tuple(lengths),
        length_table=arrays.int32(lengths),
        first_position=rows.first,
        tokens=arrays.int64(tokens),
        slots=arrays.int64(slots),
        tail=tail,
        is_tail=rows.spec.is_tail,
        exact_from=tuple(exact_from) if tail else (),
        exact_table=arrays.int64(exact_from) if tail else None,
        groups=None if rows.spec.stores_at_once else arrays.int64(groups).reshape(len(groups), 2),
    )


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
        self._cache, self._places = cache, [*cache.states.places(sequence)]
        self._pages = [list(pages) for pages in sequence.pages]
        self._scales = sequence.scales
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
        """Whether the sequence has all that `n_tokens` more tokens at its end need.

        Their rows go to pages that the sequence has. Its pages are still the ones that the batch
        was made with. No other sequence holds the pages that the rows are stored in.
        """
        return (
            self._first <= sequence.length
            and sequence.length + self.n_tokens <= self._end
            and self._cache.states.places(sequence) == self._places
            and (not self._cache.states or sequence.n_stepped == sequence.length)
            and sequence.pages == self._pages
            and sequence.scales == self._scales
            and self._is_steady(sequence.length + self.n_tokens)
            and all(pool.n_holders[page] == 1 for pool, page in self._written)
        )

    def room(self, sequence: Sequence) -> int:
        """How many tokens after a sequence's end go to the same pages as the next one; 0 if states
        follow each token, or a ladder may change pages."""
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


def uniform_cache(
    arrays: Arrays,
    *,
    n_layers: int,
    n_kv_heads: int,
    head_dim: int,
    segments: Iterable[SegmentSpec],
    **options: Any,
) -> KVCache:
    """`options` as `KVCache` takes them."""
    layouts = uniform_layouts(
        n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim, segments=segments
    )
    return KVCache(layouts, arrays=arrays, **options)
