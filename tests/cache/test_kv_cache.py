"""Pages, sequences, segments and bytes of the KV cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.arch.spec import CacheGroup
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS, GroupLayout, SegmentSpec, cache_bytes, uniform_layouts
from localkv.cache.pages import Sequence
from localkv.config import KVScales
from localkv.errors import LocalKVError
from localkv.kernels.reference.backend import read_pages, store_kv
from localkv.kernels.reference.torch_arrays import TorchArrays, decode, encode
from localkv.quant_formats import TOKEN_FORMATS
from support.attack.interruptions import Interruption
from support.cache_types import PAIRS
from support.torch_edge import torch_cache

SIZES = {"n_layers": 2, "n_kv_heads": 2, "head_dim": 32}


def new_cache(*segments: SegmentSpec, **changes: Any) -> KVCache:
    segments = segments or (SegmentSpec("f16", "f16"),)
    return torch_cache(**{**SIZES, "n_ctx": 600, **changes}, segments=segments)


def advance(cache: KVCache, sequence: Sequence, n_tokens: int) -> None:
    cache.batch([(sequence, [0] * n_tokens)])
    sequence.length += n_tokens


@pytest.mark.parametrize(("type_k", "type_v"), PAIRS)
@pytest.mark.parametrize("n_ctx", [1, 256, 257, 1000])
def test_bytes_are_those_allocated(type_k: str, type_v: str, n_ctx: int) -> None:
    spec = SegmentSpec(type_k, type_v)
    cache = new_cache(spec, n_ctx=n_ctx, n_sequences=3)
    counted = cache_bytes(uniform_layouts(**SIZES, segments=[spec]), n_ctx=n_ctx, n_sequences=3)
    assert (cache.n_bytes("k"), cache.n_bytes("v")) == counted


def rounded(x: torch.Tensor, name: str) -> torch.Tensor:
    return decode(TOKEN_FORMATS[name], encode(TOKEN_FORMATS[name], x))


@pytest.mark.parametrize("name", TOKEN_FORMATS)
def test_rows_that_were_never_stored_are_conspicuous(name: str) -> None:
    """Tests fill caches with 0xFF: it decodes to NaN in every type."""
    fmt = TOKEN_FORMATS[name]
    planes = [torch.full((3, p.n_bytes), 0xFF).byte() for p in fmt.planes]
    planes += [torch.full((1, p.n_bytes), 0xFF).byte() for p in fmt.row_planes]
    assert decode(fmt, planes).isnan().all()


@pytest.mark.parametrize("name", TOKEN_FORMATS)
def test_stored_rows_come_back(name: str) -> None:
    """Rows go to the pages of their sequence, in their segment's types, and nowhere else."""
    cache = new_cache(SegmentSpec(name, "bf16"), SegmentSpec("f16", name, 300), n_sequences=2)
    for pool in cache.pools:
        pool.free.reverse()
    layer = cache.layers[1]
    for segment in layer.segments:
        for plane in (*segment.k, *segment.v):
            plane.fill_(0xFF)
    first, second = cache.new_sequence(), cache.new_sequence()
    stored: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for sizes in ((200, 5), (150, 290), (1, 30), (249, 1)):
        parts = [(first, [0] * sizes[0]), (second, [0] * sizes[1])]
        batch = cache.batch(parts)
        k = torch.randn(sum(sizes), 2, 32)
        store_kv(k, -k, layer, batch.segments)
        for i, (sequence, ids) in enumerate(parts):
            stored[i].append(k[batch.starts[i] : batch.starts[i + 1]])
            sequence.length += len(ids)
    used = 0
    for i, sequence in enumerate((first, second)):
        want = torch.cat(stored[i]).transpose(0, 1)  # [heads, tokens, head_dim]
        assert want.shape[1] == sequence.length
        for segment, pages, pool in zip(layer.segments, sequence.pages, cache.pools, strict=True):
            start, end = pool.first, pool.end
            n = min(sequence.length, end) - start
            used += n
            table = torch.tensor(pages)
            k = read_pages(segment.format_k, segment.k, table, n, torch.float32)
            v = read_pages(segment.format_v, segment.v, table, n, torch.float32)
            rows = want[:, start : start + n]
            assert torch.equal(k, rounded(rows, segment.format_k.name))
            assert torch.equal(v, rounded(-rows, segment.format_v.name))
    written = sum(int((s.k[0] != 0xFF).any(-1).any(-1)[:, 0].sum()) for s in layer.segments)
    assert written == used


def test_scales_of_heads_are_those_of_layer_side_and_type() -> None:
    scales = KVScales(
        *("llama", "m", 2, 2, 32, 0, 0, 1),
        absmax_k=((1.0, 2.0), (448.0, 0.0)),
        absmax_v=((1e-44, 5.0), (6.0, 7.0)),
    )
    specs = [SegmentSpec("fp8_e4m3_head", "fp8_e5m2_head"), SegmentSpec("fp8_e4m3", "f16", 300)]
    for layer, absmax_k, absmax_v in zip(
        new_cache(*specs, kv_scales=scales).layers, scales.absmax_k, scales.absmax_v, strict=True
    ):
        first, second = layer.segments
        want_k = [x / 448 if x else 1 for x in absmax_k]
        want_v = [x / 57344 if x > 1e-40 else 1 for x in absmax_v]
        assert torch.equal(first.scale_k, torch.tensor(want_k))
        assert torch.equal(first.scale_v, torch.tensor(want_v))
        assert (second.scale_k, second.scale_v) == (None, None)


def test_context_and_pages_run_out() -> None:
    cache = new_cache(n_ctx=300)
    sequence = cache.new_sequence()
    advance(cache, sequence, 300)
    with pytest.raises(LocalKVError, match="301 tokens do not fit the context of 300"):
        cache.batch([(sequence, [0])])
    with pytest.raises(LocalKVError, match="all 2 pages of 256 tokens are taken"):
        cache.batch([(cache.new_sequence(), [0])])


@pytest.mark.parametrize(
    "segments", [[], [SegmentSpec("f16", "f16", 1)], [SegmentSpec("f16", "f16")] * 2]
)
def test_segments_that_make_no_sense(segments: list[SegmentSpec]) -> None:
    with pytest.raises(ValueError, match="segments must start at position 0"):
        torch_cache(**SIZES, segments=segments, n_ctx=10)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["grow", "cut"]), st.integers(0, 600)),
        max_size=25,
    ),
    bounds=st.sampled_from([(0,), (0, 4), (0, 256, 300)]),
)
def test_no_page_is_lost_or_shared(
    steps: list[tuple[int, str, int]], bounds: tuple[int, ...]
) -> None:
    """Whatever sequences do, each page is free or belongs to one of them."""
    specs = [SegmentSpec("f16", "f16", first) for first in bounds]
    cache = new_cache(*specs, n_sequences=3, n_layers=1, n_kv_heads=1, head_dim=1)
    sequences = [cache.new_sequence() for _ in range(3)]
    for index, action, amount in steps:
        sequence = sequences[index]
        if action == "cut":
            cache.truncate(sequence, amount)
        elif 0 < amount <= cache.n_ctx - sequence.length:
            advance(cache, sequence, amount)
        for i, pool in enumerate(cache.pools):
            taken = [page for s in sequences for page in s.pages[i]]
            assert sorted(taken + pool.free) == list(range(pool.n_pages))
            for s in sequences:
                rows = max(0, min(s.length, pool.end) - pool.first)
                assert len(s.pages[i]) == -(-rows // PAGE_TOKENS)


def test_groups_have_pages_and_sizes_of_their_own() -> None:
    """Rows of two groups of layers, in two segments each."""
    groups = (CacheGroup(2, 32, 32, 0, (1, 3)), CacheGroup(1, 64, 32, 8, (0, 2, 4)))
    specs = (SegmentSpec("f16", "q8_0"), SegmentSpec("q4_0", "f32", first_position=300))
    layouts = [GroupLayout(group, specs) for group in groups]
    cache = KVCache(layouts, n_ctx=700, arrays=TorchArrays())
    assert (cache.n_bytes("k"), cache.n_bytes("v")) == cache_bytes(layouts, n_ctx=700)
    assert [layer.segments[0].k[0].shape[1] for layer in cache.layers] == [1, 2, 1, 2, 1]
    assert [layer.part for layer in cache.layers] == [2, 0, 2, 0, 2]
    cache.pools[2].free.reverse()
    sequence = cache.new_sequence()
    batch = cache.batch([(sequence, [0] * 290)])
    sequence.length = 290
    first, second = (cache.layers[i].rows_of(batch) for i in (1, 0))
    assert [rows.lengths for rows in first] == [rows.lengths for rows in second] == [(290,), (0,)]
    assert not torch.equal(first[0].page_table, second[0].page_table)
    cache.batch([(sequence, [0] * 20)])
    assert [len(pages) for pages in sequence.pages] == [2, 1, 2, 1]
    cache.truncate(sequence, 0)
    assert [len(pool.free) for pool in cache.pools] == [pool.n_pages for pool in cache.pools]


def test_an_interrupted_reservation_loses_no_page() -> None:
    """Ctrl-C at any instruction while pages are taken, copied and given back to make room."""
    window = CacheGroup(2, 32, 32, PAGE_TOKENS, (0,))
    layouts = [GroupLayout(window, (SegmentSpec("f16", "f16"),))]
    number = 0
    while True:
        number += 1
        options = {"n_ctx": 8 * PAGE_TOKENS, "n_batch": PAGE_TOKENS, "n_sequences": 2}
        cache = KVCache(layouts, arrays=TorchArrays("cpu"), **options)
        text = cache.new_sequence()
        for _ in range(3):
            cache.reserve(text, text.length + PAGE_TOKENS - 10)
            text.length += PAGE_TOKENS - 10
        fork = cache.fork(text, text.length)
        interruption = Interruption(number)
        is_cut = interruption.during(lambda: cache.reserve(fork, fork.length + PAGE_TOKENS))  # noqa: B023
        held = [page for known in (text, fork) for page in known.held(0)]
        pool = cache.pools[0]
        assert pool.n_holders == [held.count(page) for page in range(pool.n_pages)]
        assert sorted((*pool.free, *set(held))) == list(range(pool.n_pages))
        cache.reserve(fork, fork.length + PAGE_TOKENS)
        if not is_cut:
            break
    assert number > 50
