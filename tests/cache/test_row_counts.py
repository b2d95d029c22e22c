"""Rows that are read, written and kept, against the rows of batches and by brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localkv.arch.spec import AttentionParams
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import (
    GroupLayout,
    SegmentSpec,
    Tail,
    bytes_of,
    exact_bytes,
    kept_rows,
    read_rows,
    tail_segments,
    uniform_layouts,
    written_rows,
)
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.attention.plan import visible_rows
from localkv.quant_formats import FORMATS

F16 = SegmentSpec("f16", "f16")
ROWS: dict[str, tuple[SegmentSpec, ...]] = {
    "packed": (SegmentSpec("q4_0", "nuq3"),),
    "sink": (F16, SegmentSpec("kv2_1", "q4_0", 4)),
    "tail": (SegmentSpec("q4_0", "q4_0", 0, tail=Tail(0, 20)), *tail_segments(Tail(0, 20))),
    "groups": (
        F16,
        SegmentSpec("q4_1c", "q4_1", 4, tail=Tail(4, 64, 32)),
        *tail_segments(Tail(4, 64, 32)),
    ),
    "open group": (
        SegmentSpec("q8_0c", "f16", tail=Tail(0, 0, 32)),
        *tail_segments(Tail(0, 0, 32)),
    ),
}
NEWS = (1, 3, 1, 60, 1, 31, 200, 1, 2)


def layout_of(name: str, window: int = 0) -> GroupLayout:
    (layout,) = uniform_layouts(n_layers=2, n_kv_heads=3, head_dim=64, segments=ROWS[name])
    return replace(layout, group=replace(layout.group, window=window))


@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_batches(name: str, window: int) -> None:
    layout = layout_of(name, window)
    cache = KVCache([layout], n_ctx=512, n_batch=256, arrays=NumpyArrays())
    sequence, params = cache.new_sequence(), AttentionParams(1.0, window)
    for n in NEWS:
        batch, n_before = cache.batch([(sequence, [0] * n)]), sequence.length
        seen, stored = list[int](), list[int]()
        for rows in batch.segments:
            ranges = visible_rows(rows, batch, params).tolist()
            seen.append(len({row for first, end in ranges for row in range(first, end)}))
            groups = 0 if rows.groups is None else len(rows.groups)
            stored.append(len(rows.slots) + 32 * groups)
        assert read_rows(layout, n_before, n) == seen
        assert written_rows(layout, n_before, n) == stored
        sequence.length += n


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_kept(name: str) -> None:
    """All that are written, but of the tail those that the last token or its group reads."""
    layout = layout_of(name)
    for n_tokens in (1, 3, 4, 5, 35, 36, 99, 100, 101, 131, 300):
        kept, written = kept_rows(layout, n_tokens), written_rows(layout, 0, n_tokens)
        tail = layout.packed.tail
        assert kept[: len(kept) - (tail is not None)] == written[: len(kept) - (tail is not None)]
        if tail is not None:
            last = n_tokens - 1 - tail.start
            begin = max(0, last + 1 - tail.newest) // tail.group * tail.group
            needed = last + 1 - min(begin, last // tail.group * tail.group)
            assert kept[-1] == (needed if last >= 0 else 0)


def test_bytes() -> None:
    layout = layout_of("groups")
    rows = 2 * 3  # layers, heads
    # q4_1 has half a byte for a value and 4 bytes for 32 of them, by channel or by token
    packed, exact = rows * 2 * (32 + 2 * 4), rows * 2 * 64 * 2
    assert bytes_of(layout, (4, 32, 70)) == 32 * packed + 74 * exact
    assert exact_bytes(layout, (4, 32, 70)) == 74 * exact
    # an outlier of two fp16 for each 64 values, and a scale of each block
    q = [FORMATS[name].row_bytes(64) for name in ("q4_0", "nuq3")]
    assert bytes_of(layout_of("packed"), (5,)) == 5 * rows * sum(q)
    assert np.isclose(8 * q[1] / 64, FORMATS["nuq3"].bits_per_value(64))
