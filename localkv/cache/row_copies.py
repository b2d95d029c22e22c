"""Rows of a sequence, out of its pages and into pages of another cache with the same layouts.

Rows are as the formats' references have them, whatever order the backend's pages are in. What no
token has stored is zeros outside, and in the rest of the pages that are filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array, Arrays, StateRows
from localkv.cache.kv_cache import KVCache
from localkv.cache.ladder_pool import LadderPool
from localkv.cache.layout import PAGE_TOKENS
from localkv.cache.pages import Checkpoint, NoPageError, PagePool, Sequence
from localkv.quant_formats.base import QuantFormat

PAGES_AT_ONCE = 16
"""Pages of one plane of a layer that are copied together."""

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class HeldRows:
    """The rows of a pool that a sequence has.

    Attributes:
        n_rows: up to the last one.
        gone: the places of pages that were given back, each of `PAGE_TOKENS` rows.
        exact_from: see `Sequence`.
        rungs: of each page, in a pool that is a ladder's.
    """

    n_rows: int
    gone: tuple[int, ...] = ()
    exact_from: int = 0
    rungs: tuple[int, ...] = ()

    def of(self, plane: PlaneRows) -> HeldRows:
        """The rows that are in a plane; in a ladder's plane, the rows of pages on its rung."""
        if plane.rung is None:
            return self
        others = (place for place, rung in enumerate(self.rungs) if rung != plane.rung)
        return replace(self, gone=tuple(others))

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """(place, first row, end) of each page that is there, as if the rows that are there lay
        one after the other."""
        found, at = list[tuple[int, int, int]](), 0
        for place in range(-(-self.n_rows // PAGE_TOKENS)):
            if place not in self.gone:
                end = at + min(PAGE_TOKENS, self.n_rows - place * PAGE_TOKENS)
                found.append((place, at, end))
                at = end
        return found

    @property
    def n_stored(self) -> int:
        """Rows that are there."""
        return max((end for _, _, end in self.spans), default=0)


@dataclass(frozen=True)
class PlaneRows:
    """One plane of K or V of a layer, with all pages of a pool.

    Attributes:
        layer, segment: of the model, and of its group (`GroupLayout.segments`); a sink's rows are
            in the segment of the tail, if there is one.
        side, number: "k" or "v", and which of the type's planes.
        pool: index of the one that has the pages.
        pages: uint8 [n_pages, n_kv_heads, PAGE_TOKENS, blocks, plane bytes].
        arrays: where they live.
        rung: of a ladder, or None.
    """

    layer: int
    segment: int
    side: str
    number: int
    fmt: QuantFormat
    pool: int
    pages: Array
    arrays: Arrays
    rung: int | None = None

    @property
    def name(self) -> str:
        """What it is called outside."""
        plane = self.fmt.all_planes[self.number].name
        return f"layers.{self.layer}.segments.{self.segment}.{self.side}.{plane}"

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """Heads, blocks and bytes of a block."""
        _, n_heads, _, *field = self.pages.shape
        return (int(n_heads), int(field[0]), int(field[1]))


def planes(cache: KVCache) -> Iterator[PlaneRows]:
    """All planes, each once, in the order of the layers."""
    for i, layer in enumerate(cache.layers):
        for number, segment in enumerate(layer.segments):
            rows = cache.parts[layer.part + number]
            if rows.rung is None and cache.pools[rows.pool].segment != number:
                continue
            for side, fmt in (("k", segment.format_k), ("v", segment.format_v)):
                for j, pages in enumerate(getattr(segment, side)):
                    yield PlaneRows(
                        i, number, side, j, fmt, rows.pool, pages, cache.arrays_of(i), rows.rung
                    )


def held_rows(cache: KVCache, sequence: Sequence) -> list[HeldRows]:
    """What a sequence has in each pool."""
    return [
        HeldRows(
            n_held(pool, sequence.length, rungs := _rungs(pool, sequence)),
            tuple(sorted(sequence.gone[pool.index])),
            sequence.exact_from[pool.index],
            rungs,
        )
        for pool in cache.pools
    ]


def n_held(pool: PagePool, length: int, rungs: tuple[int, ...]) -> int:
    """Rows that a sequence of `length` tokens has: all of its last page, where this was cut and
    packs several tokens together.

    Args:
        rungs: of its pages, in a ladder's pool.
    """
    if isinstance(pool, LadderPool) and rungs and rungs[-1] >= pool.sizes.n_storing:
        return PAGE_TOKENS * len(rungs)
    return pool.n_rows(length)


def rows_out(
    cache: KVCache, sequence: Sequence, plane: PlaneRows, held: HeldRows
) -> Iterator[Bytes]:
    """The rows of a plane that a sequence has, some pages at a time: uint8 [rows, *row_shape]."""
    pool, pages = cache.pools[plane.pool], sequence.pages[plane.pool]
    empty = empty_rows(pool)
    for spans in _some(held.spans):
        ids = _ids(pool, pages, spans)
        found = plane.arrays.rows_of_pages(plane.fmt, plane.side, plane.number, plane.pages[ids])
        rows = found.swapaxes(1, 2).reshape(-1, *plane.row_shape)
        if spans[0][0] == 0 and len(empty):
            rows = rows.copy()
            rows[empty.start : empty.stop] = 0
        yield rows[: spans[-1][2] - spans[0][1]]


def rows_in(
    cache: KVCache, sequence: Sequence, plane: PlaneRows, held: HeldRows, rows: Bytes
) -> None:
    """Fill the pages of a sequence with the rows that `rows_out` gave, one chunk after the other.

    Args:
        held: what `rows` has; pages of it that the sequence does without are left out.
    """
    pool = cache.pools[plane.pool]
    pages, gone = sequence.pages[plane.pool], sequence.gone[plane.pool]
    wanted = [span for span in held.spans if span[0] not in gone]
    for spans in _some(wanted):
        whole = np.zeros((len(spans), PAGE_TOKENS, *plane.row_shape), np.uint8)
        for page, (_, start, end) in zip(whole, spans, strict=True):
            page[: end - start] = rows[start:end]
        ids = _ids(pool, pages, spans)
        ordered = np.ascontiguousarray(whole.swapaxes(1, 2))
        plane.pages[ids] = plane.arrays.pages_of_rows(plane.fmt, plane.side, plane.number, ordered)


def take_pages(cache: KVCache, sequence: Sequence, held: Seq[HeldRows]) -> bool:
    """Give an empty sequence the pages for rows; whether there were enough. The rows of a group
    that is still open have one, too."""
    for pool, rows in zip(cache.pools, held, strict=True):
        gone = dropped(pool, sequence.length, rows)
        pages = sequence.pages[pool.index]
        for place in range(pool.n_places(sequence.length)):
            if place in gone:
                sequence.gone[pool.index].add(place)
                pages.append(0)
                continue
            try:
                pages.append(_taken(pool, rows, place))
            except NoPageError:
                return False
            if place * PAGE_TOKENS >= rows.n_rows:
                cache.clear_page(pool.index, pages[-1])
        sequence.exact_from[pool.index] = rows.exact_from
        if _rungs(pool, sequence) != rows.rungs:  # the first went down for the last
            return False
    return True


def dropped(pool: PagePool, length: int, held: HeldRows) -> set[int]:
    """The places of a pool that a sequence does without.

    These are the ones that are gone. If the pool doesn't allow it that many pages, they are also
    the oldest, which it needs least.
    """
    gone, n_places = set(held.gone), pool.n_places(length)
    needed = pool.first_place(length)
    for place in range(pool.kept, needed):
        if n_places - len(gone) <= pool.most:
            break
        gone.add(place)
    return gone


def _taken(pool: PagePool, held: HeldRows, place: int) -> int:
    """A page for the rows at a place."""
    return pool.take_on(held.rungs[place]) if isinstance(pool, LadderPool) else pool.take()


def _rungs(pool: PagePool, sequence: Sequence) -> tuple[int, ...]:
    """The rungs of a sequence's pages in a ladder's pool; none in another pool."""
    if not isinstance(pool, LadderPool):
        return ()
    return tuple(pool.rungs[page] for page in sequence.pages[pool.index])


def _ids(pool: PagePool, pages: Seq[int], spans: Seq[tuple[int, int, int]]) -> list[int]:
    """Where pages are in a plane."""
    ids = [pages[place] for place, _, _ in spans]
    return [pool.place(page) for page in ids] if isinstance(pool, LadderPool) else ids


def empty_rows(pool: PagePool) -> range:
    """Rows that nobody stores, between a sink and the tail's first."""
    if pool.tail is None:
        return range(0)
    return range(pool.tail.start, pool.tail.skipped)


def _some(spans: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    for i in range(0, len(spans), PAGES_AT_ONCE):
        yield spans[i : i + PAGES_AT_ONCE]


def memory_out(arrays: Arrays, state: StateRows, kept: Seq[Checkpoint]) -> Floats:
    """The memories of a layer in checkpoints: float32 [n, heads, rows, columns]."""
    assert state.memory is not None
    heads, n_rows, n_columns = map(int, state.memory.shape[1:])
    piece = arrays.memory_piece(n_columns)
    found = _parts(kept, state.first + state.memory_at, heads * n_rows * n_columns)
    pieces = found.reshape(-1, heads, n_columns // piece, n_rows, piece)
    return np.ascontiguousarray(pieces.swapaxes(2, 3)).reshape(-1, heads, n_rows, n_columns)


def conv_out(state: StateRows, kept: Seq[Checkpoint]) -> Floats:
    """The rows of a layer in checkpoints: float32 [n, n_rows, n_channels]."""
    n_rows, n_channels = map(int, state.rows.shape[1:])
    return _parts(kept, state.first + state.rows_at, n_rows * n_channels).reshape(
        -1, n_rows, n_channels
    )


def _parts(kept: Seq[Checkpoint], at: int, n: int) -> Floats:
    parts = np.zeros((len(kept), n), np.float32)
    for row, item in zip(parts, kept, strict=True):
        row[:] = item.data[at : at + n]
    return parts


def checkpoints_in(
    cache: KVCache, lengths: Iterable[int], conv: dict[int, Floats], memory: dict[int, Floats]
) -> list[Checkpoint]:
    """Checkpoints of what `conv_out` and `memory_out` gave of each layer."""
    states = cache.states
    found = [Checkpoint(length, np.zeros(states.n_floats, np.float32)) for length in lengths]
    for i, state in states.layers.items():
        _put(found, state.first + state.rows_at, conv[i])
        if state.memory is not None:
            count, heads, n_rows, n_columns = memory[i].shape
            piece = cache.arrays_of(i).memory_piece(n_columns)
            rows = memory[i].reshape(count, heads, n_rows, n_columns // piece, piece)
            _put(found, state.first + state.memory_at, rows.swapaxes(2, 3))
    return found


def _put(kept: Seq[Checkpoint], at: int, values: Floats) -> None:
    for item, row in zip(kept, values.reshape(len(kept), -1), strict=True):
        item.data[at : at + len(row)] = row
