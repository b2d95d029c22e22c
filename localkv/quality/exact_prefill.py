"""A cache for measuring: a batch sees its own rows as they are, and only earlier ones packed.

So count those who pack the cache once a prompt has been evaluated. Nothing but a measurement should
run like this: text is generated from packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from localkv.cache.arrays import Batch, LayerCache, SegmentBatch, Wanted
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import GroupLayout, SegmentSpec
from localkv.cache.pages import Sequence


class ExactPrefillCache(KVCache):
    """A `KVCache` of one sequence whose layers have one more segment: the batch's own rows, in f32.

    The other segments store the batch's rows as ever, but show attention only those before.

    Args:
        n_batch: most tokens of a batch.
        layouts, options: the arguments of `KVCache`.
    """

    def __init__(self, layouts: Seq[GroupLayout], *, n_batch: int, **options: Any) -> None:
        super().__init__(layouts, n_batch=n_batch, **options)
        plain = [replace(layout, segments=(SegmentSpec("f32", "f32"),)) for layout in layouts]
        self._own = KVCache(plain, **(options | {"n_ctx": min(n_batch, self.n_ctx)}))
        self._own_sequence = self._own.new_sequence()  # stays empty: each batch starts at row 0
        self._blocks = dict[tuple[int, int, int], int]()
        n_parts = 0
        for i, (layer, own) in enumerate(zip(self.layers, self._own.layers, strict=True)):
            block = layer.part, len(layer.segments), own.part
            if block not in self._blocks:
                self._blocks[block] = n_parts
                n_parts += len(layer.segments) + 1
            segments = (*layer.segments, *own.segments)
            self.layers[i] = LayerCache(segments, self._blocks[block], layer.state)

    def batch(
        self,
        parts: Seq[tuple[Sequence, Seq[int]]],
        *,
        logits: Wanted | Seq[Wanted] = "last",
        generated: bool | Seq[bool] = False,
    ) -> Batch:
        """See `KVCache.batch`; `parts` is one sequence."""
        ((sequence, ids),) = parts
        batch = super().batch(parts, logits=logits, generated=generated)
        own = self._own.batch([(self._own_sequence, ids)])
        segments = list[SegmentBatch]()
        for first, n_segments, own_part in self._blocks:
            for i in range(first, first + n_segments):
                part, rows = self.parts[i], batch.segments[i]
                length = max(0, min(sequence.length, part.end) - part.first)
                segments.append(replace(rows, lengths=(min(length, *rows.lengths),)))
            segments.append(replace(own.segments[own_part], first_position=sequence.length))
        return replace(batch, segments=tuple(segments))
