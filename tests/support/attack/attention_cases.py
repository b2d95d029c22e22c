"""Random attention and stores on guarded memory; see `kernel_cases.py`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams
from localkv.cache.arrays import Batch, LayerCache, Segment, SegmentBatch
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import SegmentSpec, Tail
from localkv.kernels.attention import pack_groups as pack_all_groups
from localkv.kernels.cpu.runtime.chain import Chain, Scratch
from localkv.kernels.cpu.store.store_kv import add_store, stored_rows
from localkv.kernels.reference.backend import (
    attention_reference,
    hadamard_transform,
    pack_groups,
    store_kv,
)
from localkv.quant_formats import KV_FORMATS, TOKEN_FORMATS
from support.attack.random_calls import threads
from support.cpu_ops import cpu_attention, store_kv_cpu
from support.cpu_pages import pool_planes
from support.guarded_memory import GuardedMemory
from support.tail_checks import segments as tail_rows
from support.torch_edge import numpy_of, torch_cache

GROUPS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 17, 23, 31, 48, 95, 96, 97, 112, 128, 193, 291, 512)
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 160, 256)
WINDOWS = (0, 0, 0, 1, 2, 17, 63, 64, 65, 255, 256, 257, 700)
MOST_WORK = 2_000_000
"""Products of a case, so that none takes long."""


def lengths_of(rng: random.Random, n_sequences: int) -> list[tuple[int, int]]:
    past = (0, 0, 1, 15, 16, 63, 64, 250, 255, 256, 257, 511, 700)
    new = (1, 1, 1, 2, 3, 5, 16, 17, 40, 97, 270)
    return [(rng.choice(past), rng.choice(new)) for _ in range(n_sequences)]


def guarded_segment(memory: GuardedMemory, segment: Segment) -> Segment:
    k, v = (
        tuple(memory.tensor(plane, f"a plane of {side}") for plane in planes)
        for side, planes in (("K", segment.k), ("V", segment.v))
    )
    books = {
        name: memory.tensor(book, "a codebook")
        for name in ("codebook_k", "codebook_v")
        if (book := getattr(segment, name)) is not None
    }
    return replace(segment, k=k, v=v, **books)


def guarded_layer(memory: GuardedMemory, layer: LayerCache) -> LayerCache:
    """A sink and a tail have the same pages here, too."""
    found = list[Segment]()
    for segment in layer.segments:
        same = [
            ours
            for ours, theirs in zip(found, layer.segments, strict=False)
            if theirs.k[0].data_ptr() == segment.k[0].data_ptr()
        ]
        pages = {"k": same[0].k, "v": same[0].v} if same else {}
        found.append(replace(segment, **pages) if same else guarded_segment(memory, segment))
    return LayerCache(tuple(found))


def guarded_rows(memory: GuardedMemory, rows: SegmentBatch) -> SegmentBatch:
    tensors = {f.name: getattr(rows, f.name) for f in fields(rows)}
    return replace(
        rows, **{n: memory.tensor(x, n) for n, x in tensors.items() if isinstance(x, Tensor)}
    )


def head_dim_of(rng: random.Random, *names: str) -> int:
    block = math.lcm(*(KV_FORMATS[name].block_size for name in names))
    return rng.choice([d for d in HEAD_DIMS if d % block == 0])


def shuffled_cache(
    rng: random.Random,
    specs: list[SegmentSpec],
    n_kv_heads: int,
    head_dim: int,
    lengths: list[tuple[int, int]],
) -> KVCache:
    """With room for sequences of (past, new) tokens, and its pages in no order."""
    cache = torch_cache(
        n_layers=1,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        segments=specs,
        n_ctx=max(past + new for past, new in lengths),
        n_sequences=len(lengths),
    )
    for pool in cache.pools:
        rng.shuffle(pool.free)
    return cache


def attention_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """Decode and prefill in one batch, on permuted pages that hold NaN where nothing was stored.

    Rows are in one segment or several, or in a tail, too, of which groups of rows are packed.
    """
    type_k, type_v = rng.choice(list(KV_FORMATS)), rng.choice(list(KV_FORMATS))
    together = max(KV_FORMATS[name].group_tokens for name in (type_k, type_v))
    head_dim, group = head_dim_of(rng, type_k, type_v), rng.choice(GROUPS)
    n_kv_heads, window = rng.choice((1, 1, 2, 3)), rng.choice(WINDOWS)
    softcap = rng.choice((0.0, 0.0, 0.0, 5.0))
    lengths = lengths_of(rng, rng.choice((1, 1, 2, 3, 5)))
    bounds = rng.choice(((0,), (0,), (0,), (0, 1), (0, 4, 260), (0, 256)))
    tail = None
    if together > 1 or rng.random() < 0.2:
        tail = Tail(rng.choice((0, 0, 1, 4, 70)), rng.choice((0, 1, 17, 64, 300)), together)

    def work() -> int:
        rows = sum(new * (past + new) for past, new in lengths)
        return rows * n_kv_heads * group * head_dim // 64

    while work() > MOST_WORK and len(lengths) > 1:
        lengths.pop()
    while work() > MOST_WORK:
        lengths = [(lengths[0][0] // 2, max(1, lengths[0][1] // 2))]
    generated = [rng.random() < 0.5 for _ in lengths]
    say(
        f"{type_k}/{type_v} head_dim {head_dim} group {group} x {n_kv_heads} window {window} "
        f"softcap {softcap} lengths {lengths} segments {tail or bounds} generated {generated} "
        f"threads {threads(rng)}"
    )
    specs = [SegmentSpec(type_k, type_v, first) for first in bounds]
    if tail is not None:
        specs = list(tail_rows(tail, type_k, type_v, 0))
    cache = shuffled_cache(rng, specs, n_kv_heads, head_dim, lengths)
    layer = cache.layers[0]
    for segment in layer.segments:
        for plane in (*segment.k, *segment.v):
            plane.fill_(0xFF)
    ours = guarded_layer(memory, layer)
    clear_page = cache.clear_page

    def clear_both(pool: int, page: int) -> None:
        """Pages of a tail are cleared as they are taken."""
        clear_page(pool, page)
        for i, segment in enumerate(ours.segments):
            if cache.layouts[0].pool_of(i) == pool:
                for plane in (*segment.k, *segment.v):
                    plane[page] = 0

    cache.clear_page = clear_both  # type: ignore[method-assign]
    sequences = [cache.new_sequence() for _ in lengths]

    def store(parts: list[tuple[int, int]]) -> Batch:
        batch = cache.batch(
            [(sequences[i], [0] * n) for i, n in parts], generated=[generated[i] for i, _ in parts]
        )
        k, v = (torch.randn(batch.starts[-1], n_kv_heads, head_dim) for _ in range(2))
        for segment, rows in zip(layer.segments, batch.segments, strict=True):
            if len(rows.tokens):
                store_kv(k, v, LayerCache((segment,)), (rows,))
        pack_all_groups(pack_groups, layer, batch.segments)
        segments = tuple(guarded_rows(memory, rows) for rows in batch.segments)
        batch = replace(
            batch, segments=segments, positions=memory.tensor(batch.positions, "positions")
        )
        ours_k, ours_v = (memory.tensor(x, "rows") for x in (k, v))
        store_kv_cpu(ours_k, ours_v, ours, batch.segments)
        for i, n in parts:
            sequences[i].length += n
        return batch

    pasts = [(i, past) for i, (past, _) in enumerate(lengths) if past]
    if pasts:
        store(pasts)
    batch = store([(i, new) for i, (_, new) in enumerate(lengths)])
    assert all(torch.equal(got, want) for got, want in planes_as_reference(ours, layer))
    q = memory.tensor(torch.randn(batch.starts[-1], n_kv_heads * group, head_dim), "queries")
    params = AttentionParams(1 / math.sqrt(head_dim), window, softcap)
    run = cpu_attention()
    for segment, reference, rows in zip(ours.segments, layer.segments, batch.segments, strict=True):
        for _ in range(2):
            out, lse = run(q, segment, rows, batch, params)
        want, want_lse = attention_reference(q.double(), reference, rows, batch, params)
        assert not out.isnan().any(), "scratch memory that was not written was read"
        assert torch.equal(lse.isinf(), want_lse.isinf())
        seen = ~want_lse.isinf()
        size = float(want[seen].norm())
        # weights are rounded; sums of many normal numbers are far smaller than what is added up
        most = 1e-4 * size + 1e-5 * math.sqrt(want[seen].numel())
        assert float((out[seen] - want[seen]).norm()) <= most, "outputs differ"
        assert not seen.any() or float((lse[seen] - want_lse[seen]).abs().max()) < 1e-3
        assert float(out[~seen].abs().sum()) == 0


def planes_as_reference(ours: LayerCache, reference: LayerCache) -> Iterator[tuple[Tensor, Tensor]]:
    """Each plane that has pages, in the reference's order, and the reference's."""
    for mine, theirs in zip(ours.segments, reference.segments, strict=True):
        for side, fmt in (("k", mine.format_k), ("v", mine.format_v)):
            got = getattr(mine, side)
            if len(got[0]):
                yield from zip(pool_planes(fmt, side, got), getattr(theirs, side), strict=True)


def store_case(rng: random.Random, memory: GuardedMemory, say: Callable[[str], None]) -> None:
    """Rows of a few tokens into pages full of random bytes."""
    type_k, type_v = rng.choice(list(TOKEN_FORMATS)), rng.choice(list(TOKEN_FORMATS))
    head_dim, n_kv_heads = head_dim_of(rng, type_k, type_v), rng.choice((1, 2, 3, 5))
    powers = [0] + [1 << i for i in range(1, 9) if head_dim % (1 << i) == 0]
    rotations = rng.choice(powers), rng.choice(powers)
    bounds = rng.choice(((0,), (0,), (0, 3), (0, 250, 300)))
    lengths = lengths_of(rng, rng.choice((1, 2, 3)))
    say(
        f"{type_k}/{type_v} head_dim {head_dim} x {n_kv_heads} rotated {rotations} "
        f"lengths {lengths} segments {bounds} threads {threads(rng)}"
    )
    specs = [SegmentSpec(type_k, type_v, first, *rotations) for first in bounds]
    cache = shuffled_cache(rng, specs, n_kv_heads, head_dim, lengths)
    layer = cache.layers[0]
    for segment in layer.segments:
        for plane in (*segment.k, *segment.v):
            plane.random_(0, 256)
    ours = LayerCache(tuple(guarded_segment(memory, segment) for segment in layer.segments))
    for got, want in planes_as_reference(ours, layer):
        want.copy_(got)
    sequences = [cache.new_sequence() for _ in lengths]
    for sequence, (past, _) in zip(sequences, lengths, strict=True):
        cache.reserve(sequence, past)
        sequence.length = past
    parts = [(sequence, [0] * new) for sequence, (_, new) in zip(sequences, lengths, strict=True)]
    batch = cache.batch(parts)
    n_tokens = batch.starts[-1]
    k, v = (torch.randn(n_tokens, n_kv_heads, head_dim) for _ in range(2))
    rows = tuple(guarded_rows(memory, rows) for rows in batch.segments)
    ours_k, ours_v = (memory.tensor(x, "rows") for x in (k, v))
    rotate = rng.random() < 0.7
    if rotate:
        chain = Chain(Scratch())
        add_store(chain, "k", "v", n_tokens, numpy_of(ours))
        stored = stored_rows(numpy_of(ours), numpy_of(rows), n_tokens)
        chain.run(k=numpy_of(ours_k), v=numpy_of(ours_v), **stored)
    else:
        store_kv_cpu(ours_k, ours_v, ours, rows)
    for segment, stored in zip(layer.segments, batch.segments, strict=True):
        if not len(stored.tokens):
            continue
        turned_k = hadamard_transform(k, rotations[0] if rotate else 0)
        turned_v = hadamard_transform(v, rotations[1] if rotate else 0)
        store_kv(turned_k, turned_v, LayerCache((segment,)), (stored,))
    # byte for byte: the rows that were stored, and all others as they were
    assert all(torch.equal(got, want) for got, want in planes_as_reference(ours, layer))
