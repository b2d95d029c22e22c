"""Where pages of a ladder lie: in one arena of bytes for each layer, seen as planes of a rung."""

from __future__ import annotations

from collections.abc import Sequence as Seq

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


def rung_batch(
    rows: SegmentRows,
    pool: LadderPool,
    parts: Seq[tuple[Sequence, Seq[int]]],
    starts: Seq[int],
    arrays: Arrays,
) -> SegmentBatch:
    """A batch's part in the segment of a rung.

    A sequence's table has its pages on this rung in order of position, as if no others were
    between them. If the batch's rows go to this rung, those pages are the last ones, and row 0 has
    a position by which they get theirs.
    """
    tables, lengths, firsts = list[list[int]](), list[int](), list[int]()
    tokens, slots = list[int](), list[int]()
    for (sequence, ids), start in zip(parts, starts, strict=False):
        pages, n_full = sequence.pages[rows.pool], sequence.length // PAGE_TOKENS
        end = sequence.length + len(ids)
        found = [page for page in pages[:n_full] if pool.rungs[page] == rows.rung]
        length = PAGE_TOKENS * len(found)
        first = 0
        if pool.rungs[pages[n_full]] == rows.rung:
            first = PAGE_TOKENS * n_full - length
            found += pages[n_full : pool.n_places(end)]
            length = end - first
            for i in range(len(ids)):
                row = sequence.length + i - first
                tokens.append(start + i)
                place = pool.place(found[row // PAGE_TOKENS])
                slots.append(place * PAGE_TOKENS + row % PAGE_TOKENS)
        tables.append([pool.place(page) for page in found])
        lengths.append(length)
        firsts.append(first)
    width = max((len(table) for table in tables), default=0) or 1
    return SegmentBatch(
        page_table=arrays.int64([table + [0] * (width - len(table)) for table in tables]),
        lengths=tuple(lengths),
        length_table=arrays.int32(lengths),
        first_position=0,
        tokens=arrays.int64(tokens),
        slots=arrays.int64(slots),
        first_positions=tuple(firsts),
    )
