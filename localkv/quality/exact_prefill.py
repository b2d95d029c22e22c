"""A cache for measuring: a batch sees its own rows as they are, and only earlier ones packed.

So count those who pack the cache once a prompt has been evaluated. Nothing but a measurement should
run like this: text is generated from packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Literal

from localkv.cache.batch import Batch, SegmentBatch
from localkv.cache.kv_cache import KVCache
from localkv.cache.layer_cache import LayerCache
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
        n_segments = len(self.bounds) + 1
        self.layers = [
            LayerCache((*layer.segments, *own.segments), own.pool * n_segments, layer.state)
            for layer, own in zip(self.layers, self._own.layers, strict=True)
        ]

    def batch(
        self,
        parts: Seq[tuple[Sequence, Seq[int]]],
        *,
        logits: Literal["last", "all"] = "last",
        generated: bool | Seq[bool] = False,
    ) -> Batch:
        """See `KVCache.batch`; `parts` is one sequence."""
        ((sequence, ids),) = parts
        batch = super().batch(parts, logits=logits, generated=generated)
        own = self._own.batch([(self._own_sequence, ids)])
        segments = list[SegmentBatch]()
        for group, rows in enumerate(own.segments):
            for i, (first, end) in enumerate(self.bounds):
                earlier = batch.segments[group * len(self.bounds) + i]
                length = max(0, min(sequence.length, end) - first)
                segments.append(replace(earlier, lengths=(length,)))
            segments.append(replace(rows, first_position=sequence.length))
        return replace(batch, segments=tuple(segments))
