"""Pages that change their types on a GPU, in the interpreter, against the reference backend."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from localkv.arch.spec import AttentionParams, CacheGroup
from localkv.cache.arrays import Batch
from localkv.cache.kv_cache import KVCache
from localkv.cache.ladder import Pair, parse_ladder, stores_rows
from localkv.cache.layout import PAGE_TOKENS, group_layouts
from localkv.cache.pages import Sequence
from localkv.config import CacheConfig
from localkv.kernels.attention import attention, store_rotated
from localkv.kernels.gpu.attention.packed_attention import segment_attention
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.group_store import SIDES, repack_page_gpu, rotate_gpu, unpack_page
from localkv.kernels.gpu.rope_store import QueryKeySteps, rope_store
from localkv.kernels.reference.backend import attention_reference, hadamard_transform, store_kv
from localkv.kernels.reference.torch_arrays import TorchArrays, decode, encode
from localkv.quant_formats import KV_FORMATS
from support.quick import quick

GPU = GpuInfo(arch=90, n_processors=3, ptx=False)
HEADS, HEAD_DIM, GROUP = 2, 64, 2


def cache_of(ladder: tuple[Pair, ...], n_pages: float) -> KVCache:
    """With room for that many pages of the first types."""
    (type_k, type_v), *_ = ladder
    group = CacheGroup(HEADS, HEAD_DIM, HEAD_DIM, 0, (0,))
    bits = sum(KV_FORMATS[name].bits_per_value(HEAD_DIM) for name in (type_k, type_v))
    budget = int(n_pages * PAGE_TOKENS * HEADS * HEAD_DIM * bits / 8)
    config = CacheConfig(type_k, type_v, kv_budget=budget, kv_ladder=ladder)
    layouts = group_layouts(config, [group])
    return KVCache(layouts, n_ctx=16 * PAGE_TOKENS, n_sequences=2, arrays=TorchArrays())


def append(
    cache: KVCache, parts: list[tuple[Sequence, int]], *, kernel: bool = False
) -> tuple[Tensor, Batch]:
    """Evaluate new tokens of some sequences, with random rows, which the reference stores or the
    kernel: queries, and the batch."""
    generator = torch.Generator().manual_seed(parts[0][0].length)
    batch = cache.batch([(sequence, [0] * n) for sequence, n in parts])
    n_tokens, layer = len(batch.token_ids), cache.layers[0]
    heads = (GROUP * HEADS, HEADS, HEADS)
    q, k, v = (torch.randn(n_tokens, n, HEAD_DIM, generator=generator) for n in heads)
    if kernel:
        q = rope_store(q, k, v, QueryKeySteps(), layer, layer.rows_of(batch))
    else:
        store_rotated(store_kv, hadamard_transform, k, v, layer, layer.rows_of(batch))
    for sequence, n in parts:
        sequence.length += n
    return q, batch


CHAIN = [("f16", "q8_0"), ("q8_0", "q5_1"), ("q5_1", "q4_0")]
OTHERS = [
    ("f32", "bf16"),
    ("bf16", "fp8_e5m2"),
    ("f16", "q8_t"),
    ("q8_t", "q6_0"),
    ("fp8_e4m3_token", "iq4_nl"),
    ("q5_0", "q4_t"),
    ("q4_1", "kv3_1"),
    ("kv3_0", "kv2_1"),
    ("q8_0", "q8_0c"),
    ("q5_1", "q4_1c"),
    ("q4_1c", "kv3_1c"),
    ("kv3_1c", "kv2_1"),
    ("q4_1c128", "kv3_1c128"),
    ("q8_0c", "q4_1c128"),
]


@pytest.mark.parametrize(
    ("source", "target"), quick([*CHAIN, *OTHERS], [*CHAIN, OTHERS[2], ("q5_1", "q4_1c")])
)
def test_a_page_is_packed_from_what_attention_reads(source: str, target: str) -> None:
    """And no byte beside it changes."""
    begin = () if stores_rows(source, source) else (("f16", "f16"),)
    cache = cache_of((*begin, (source, source), (source, target), (target, target)), 3)
    assert cache.ladder is not None
    sequence = cache.new_sequence()
    append(cache, [(sequence, 2 * PAGE_TOKENS)])
    assert cache._arenas is not None
    (arena,) = cache._arenas.arenas.values()
    sizes, rungs = cache.ladder.sizes, cache.layers[0].segments
    place = cache.ladder.place(sequence.pages[0][1])
    for segment, smaller in pairwise(rungs):
        before, rows, kept = arena.clone(), dict[str, Tensor](), list[Tensor]()
        for side in SIDES:
            fmt, planes = getattr(segment, f"format_{side}"), getattr(segment, side)
            rows[side] = unpack_page(GPU, segment, side, place).swapaxes(0, 1)
            stored = decode(fmt, [plane[place] for plane in planes])
            assert float((rows[side] - stored).norm() / stored.norm()) < 1e-3
            if fmt == getattr(smaller, f"format_{side}"):
                kept = [plane[place].clone() for plane in planes]
        repack_page_gpu(GPU, segment, smaller, place)
        for side in SIDES:
            fmt, planes = getattr(smaller, f"format_{side}"), getattr(smaller, side)
            wanted = kept
            if fmt != getattr(segment, f"format_{side}"):
                turns = [getattr(one, f"rotation_{side}") for one in (segment, smaller)]
                x = rows[side]
                if turns[0] != turns[1]:
                    x = hadamard_transform(hadamard_transform(x, turns[0]), turns[1])
                wanted = encode(fmt, x)
            for plane, want in zip(planes, wanted, strict=True):
                different = (plane[place] != want).float().mean()
                assert different < 1e-3 if wanted is not kept else different == 0
        end = place + sizes.units[rungs.index(smaller)]
        assert torch.equal(arena[:place], before[:place])
        assert torch.equal(arena[end:], before[end:])


@pytest.mark.parametrize(
    ("ladder", "n_pages", "new"),
    [
        ("f16,q8_0/q8_0,q8_0/q4_0,q4_0/q4_0", 4, 1),
        ("f16,q8_t/q5_1", 2, 20),
        ("f16,q4_1c/q4_1", 2, 20),
    ],
    ids=["decode", "prefill", "channels"],
)
def test_attention_over_runs_of_equal_pages(ladder: str, n_pages: int, new: int) -> None:
    cache = cache_of(parse_ladder(ladder), 2.7)
    assert cache.ladder is not None
    one, other = cache.new_sequence(), cache.new_sequence()
    for sequence, n in ((other, 100), *[(one, PAGE_TOKENS)] * n_pages, (one, 50)):
        append(cache, [(sequence, n)])
    assert sum(count > 0 for count in cache.ladder.counts()) > 1
    q, batch = append(cache, [(one, new), (other, 2)], kernel=True)
    params = AttentionParams(1 / math.sqrt(HEAD_DIM))
    ours, wanted = (
        attention(run, q, cache.layers[0], batch, params, rotate=rotate)
        for run, rotate in (
            (partial(segment_attention, GPU), rotate_gpu),
            (attention_reference, hadamard_transform),
        )
    )
    assert float((ours - wanted).norm() / wanted.norm()) < 1.5e-3
