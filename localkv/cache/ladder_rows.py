"""Where pages of a ladder lie: in one arena of bytes for each layer, seen as planes of a rung."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from localkv.cache.arrays import Array, Arrays
from localkv.cache.batch import SegmentBatch
from localkv.cache.ladder import LadderSizes
from localkv.cache.ladder_pool import LadderPool
from localkv.cache.layer_cache import row_fields
from localkv.cache.layout import PAGE_TOKENS, GroupLayout
from localkv.cache.pages import Sequence
from localkv.cache.segment_rows import SegmentRows
from localkv.formats import FORMATS

Planes = tuple[tuple[Array, ...], tuple[Array, ...]]
"""Of K and of V."""


class LadderRows:
    """The memory of a ladder's pages.

    Args:
        layout: of the layers.
        sizes: of the arenas.

    Attributes:
        arenas: of each layer, uint8 [units, bytes of a unit].
    """

    def __init__(self, arrays: Arrays, layout: GroupLayout, sizes: LadderSizes) -> None:
        self.arrays, self.layout, self.sizes = arrays, layout, sizes
        shape = (sizes.n_units, sizes.unit)
        self.arenas = {layer: arrays.bytes(shape) for layer in layout.group.layers}

    def planes(self, layer: int, rung: int) -> Planes:
        """The planes of a rung: uint8 [places, n_kv_heads, PAGE_TOKENS, blocks, plane bytes].

        A page at place p begins at unit p, K's planes first. Places of pages that are in use are
        as far apart as these are long; the planes of other rungs are views of the same bytes.
        """
        spec, group, sizes = self.layout.segments[rung], self.layout.group, self.sizes
        n_places = max(0, sizes.n_units - sizes.units[rung] + 1)
        first, sides = 0, list[tuple[Array, ...]]()
        for name, dim in ((spec.type_k, group.key_dim), (spec.type_v, group.value_dim)):
            planes = list[Array]()
            for n_blocks, n_bytes in row_fields(FORMATS[name], dim):
                shape = (n_places, group.n_kv_heads, PAGE_TOKENS, n_blocks, n_bytes)
                planes.append(self.arrays.strided(self.arenas[layer], first, shape, sizes.unit))
                first += group.n_kv_heads * PAGE_TOKENS * n_blocks * n_bytes
            sides.append(tuple(planes))
        return sides[0], sides[1]

    def move(self, n: int, first: int, to: int) -> None:
        """Move units of each layer further to the front; they may overlap."""
        for arena in self.arenas.values():
            for at in range(0, n, max(1, first - to)):  # pieces that don't overlap
                size = min(first - to, n - at)
                arena[to + at : to + at + size] = arena[first + at : first + at + size]

    def copy(self, n: int, first: int, to: int) -> None:
        """Copy units of each layer to others."""
        for arena in self.arenas.values():
            arena[to : to + n] = arena[first : first + n]


@dataclass(frozen=True)
class RungPages:
    """A sequence's pages on a rung, in order of position, as if no others were between them.

    Attributes:
        places: of the pages.
        n_rows: in them, those of new tokens included.
        first: the position of row 0 by which new rows get theirs, if they go here; else 0.
        grows: new rows go here; then the pages that they go to are the last ones.
    """

    places: list[int]
    n_rows: int
    first: int
    grows: bool


def rung_pages(pool: LadderPool, rung: int, pages: Seq[int], position: int, end: int) -> RungPages:
    """Of a sequence with `pages`, whose new tokens are those from `position` to `end` - 1."""
    n_full = position // PAGE_TOKENS
    found = [page for page in pages[:n_full] if pool.rungs[page] == rung]
    n_rows, first = PAGE_TOKENS * len(found), 0
    grows = pool.rungs[pages[n_full]] == rung
    if grows:
        first = PAGE_TOKENS * n_full - n_rows
        found += pages[n_full : pool.n_places(end)]
        n_rows = end - first
    return RungPages([pool.place(page) for page in found], n_rows, first, grows)


def rung_batch(
    rows: SegmentRows,
    pool: LadderPool,
    parts: Seq[tuple[Sequence, Seq[int]]],
    starts: Seq[int],
    arrays: Arrays,
) -> SegmentBatch:
    """A batch's part in the segment of a rung."""
    assert rows.rung is not None
    tables, lengths, firsts = list[list[int]](), list[int](), list[int]()
    tokens, slots = list[int](), list[int]()
    for (sequence, ids), start in zip(parts, starts, strict=False):
        end = sequence.length + len(ids)
        found = rung_pages(pool, rows.rung, sequence.pages[rows.pool], sequence.length, end)
        for i in range(len(ids)) if found.grows else ():
            row = sequence.length + i - found.first
            tokens.append(start + i)
            slots.append(found.places[row // PAGE_TOKENS] * PAGE_TOKENS + row % PAGE_TOKENS)
        tables.append(found.places)
        lengths.append(found.n_rows)
        firsts.append(found.first)
    width = max((len(table) for table in tables), default=0) or 1
    return SegmentBatch(
        page_table=arrays.int64([table + [0] * (width - len(table)) for table in tables]),
        lengths=tuple(lengths),
        length_table=arrays.int32(lengths),
        first_position=0,
        tokens=arrays.int64(tokens),
        slots=arrays.int64(slots),
        first_positions=tuple(firsts),
        first_table=arrays.int64(firsts),
    )
