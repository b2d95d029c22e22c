"""The bits per value that a cache has after some tokens, with all that it keeps."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.arch.spec import CacheGroup
from localkv.cache.layout import TAIL_TYPE, group_layouts
from localkv.config import CacheConfig
from localkv.quant_formats import FORMATS

LENGTHS = (1024, 16384)
"""Tokens of the text that divergences are measured with, and of a long one."""


def bits_after(cache: CacheConfig, groups: Sequence[CacheGroup], n_tokens: int) -> float:
    """Bits per value of K and V when a text has `n_tokens`.

    Counts the packed rows with their scales, the sink, and the tail that the last token reads,
    whose rows are kept twice if their types pack each by itself. Free room in pages
    is not counted, as it doesn't grow with a text. Layers with a window count as if they had none.
    """
    total = n_values = 0
    for layout in group_layouts(cache, groups):
        group, packed = layout.group, layout.packed
        n_exact = min(n_tokens, packed.first_position)
        n_packed = n_tokens - n_exact
        if packed.tail is not None and n_packed:
            begin = max(packed.first_position, packed.tail.begin(n_tokens - 1))
            n_exact += n_tokens - begin
            n_packed = n_packed // packed.tail.group * packed.tail.group
        dims = group.key_dim, group.value_dim
        exact_row = sum(FORMATS[TAIL_TYPE].row_bytes(dim) for dim in dims) * group.n_kv_heads
        n_values += len(group.layers) * group.n_kv_heads * sum(dims)
        total += n_packed * layout.row_bytes + n_exact * exact_row * len(group.layers)
    return 8 * total / n_tokens / n_values
