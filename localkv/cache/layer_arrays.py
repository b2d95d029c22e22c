"""What a cache allocates for its layers: planes of rows, scales and codebooks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

from localkv.arch.spec import CacheGroup
from localkv.cache.arrays import Array, Arrays
from localkv.cache.codebook_uses import CodebookUse
from localkv.cache.ladder import stores_rows
from localkv.cache.ladder_rows import LadderRows, Planes
from localkv.cache.layer_cache import Segment, row_fields
from localkv.cache.layout import PAGE_TOKENS, GroupLayout
from localkv.cache.pages import PagePool
from localkv.cache.scales import head_scales
from localkv.cache.segment_rows import SegmentRows
from localkv.config import KVCodebook, KVScales
from localkv.formats import FORMATS
from localkv.formats.shared.codebooks import NORMAL, table_of


class LayerArrays:
    """Allocates them, layer by layer.

    Args:
        arrays: where they live.
        kv_scales: for types that are scaled by head; without it their scales are 1.
        kv_codebooks: for types with codebooks; others have those of normal numbers.

    Attributes:
        codebooks: those that layers have taken so far.
    """

    def __init__(
        self, arrays: Arrays, kv_scales: KVScales | None, kv_codebooks: Seq[KVCodebook]
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
        """Those of a layer.

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
                k = self._planes(spec.type_k, n_pages, group, group.key_dim)
                made[rows.pool] = k, self._planes(spec.type_v, n_pages, group, group.value_dim)
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
        self, name: str, n_pages: int, group: CacheGroup, head_dim: int
    ) -> tuple[Array, ...]:
        rows = (n_pages, group.n_kv_heads, PAGE_TOKENS)
        fields = row_fields(FORMATS[name], head_dim)
        return tuple(self._arrays.bytes((*rows, *field)) for field in fields)

    def _scales(
        self, name: str, layer: int, group: CacheGroup, absmax: Seq[Seq[float]]
    ) -> Array | None:
        if not FORMATS[name].scales_by_head:
            return None
        values = head_scales(absmax[layer], name) if absmax else [1.0] * group.n_kv_heads
        return self._arrays.floats(values)

    def _codebook(self, name: str, layer: int, side: Literal["k", "v"]) -> Array | None:
        n = FORMATS[name].n_centroids
        if not n:
            return None
        measured = self._measured.get((layer, side, n))
        self.codebooks.append(CodebookUse(layer, side, name, measured is not None))
        return self._arrays.from_numpy(table_of(measured or NORMAL[n]))
