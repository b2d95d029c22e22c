"""The plan of a generated token, moved on from token to token, against a new one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from localkv.arch.spec import AttentionParams, RopeSpec
from localkv.cache.arrays import Batch
from localkv.cache.kv_cache import KVCache, uniform_cache
from localkv.cache.layout import PAGE_TOKENS, SegmentSpec, Tail, tail_segments
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.cpu.attention.jobs import Job, Sequence
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.attention.plan import Launch, Plan
from localkv.kernels.cpu.attention.program import NOTHING, TokenAttention
from localkv.kernels.rope import TokenRotations, rope_frequencies, rope_table

SHAPE = 4, 32
"""Query heads, and their channels."""
TABLE = Sequence._fields.index("table")
ADDRESSES = [Job._fields.index(name) for name in ("visible", "pieces", "sequences")]


def tokens(cache: KVCache, length: int, n: int) -> Batch:
    """Generated tokens behind `length` others, in the first pages that are free."""
    sequence = cache.new_sequence()
    cache.reserve(sequence, length)
    sequence.length = length
    batch = cache.batch([(sequence, [0] * n)], generated=True)
    cache.truncate(sequence, 0)
    return batch


def said(launch: Launch | None, plan: Plan | None) -> object:
    """All that workers read of a plan, but for addresses."""
    assert launch is not None
    assert plan is not None
    (decode,) = plan.decodes
    sequences, pages = decode.sequences.items.copy(), plan.batch.page_table
    assert (sequences[:, TABLE] == pages.ctypes.data).all()
    sequences[:, TABLE] = 0
    job = np.array(launch.job)
    tables = plan.visible, decode.chunks, decode.sequences
    assert job[ADDRESSES].tolist() == [table.address for table in tables]
    job[ADDRESSES] = 0
    facts = launch.threads, launch.scratch_floats, launch.partial_floats, launch.done_items
    visible, chunks = plan.visible.items.tolist(), decode.chunks.items.tolist()
    return job.tolist(), facts, visible, chunks, sequences.tolist(), pages.tolist()


@pytest.mark.parametrize(
    "params",
    [AttentionParams(1.0), AttentionParams(1.0, window=300), AttentionParams(1.0, chunk=200)],
    ids=["all", "window", "chunk"],
)
@pytest.mark.parametrize(("n", "most"), [(1, 15), (5, 60), (12, 110)])
def test_a_plan_is_moved_on(params: AttentionParams, n: int, most: int) -> None:
    """Also where a page is begun or left, and where the next token is none that follows."""
    kept = check_moved((SegmentSpec("f16", "f16"),), 0, params, n)
    assert len(kept) < most  # of 168


@pytest.mark.parametrize("part", [0, 1])
def test_a_plan_is_moved_on_with_a_tail(part: int) -> None:
    """The plan has packed rows and a tail, whose pages come and go."""
    tail = Tail(0, 64)
    segments = SegmentSpec("q4_0", "q4_0", tail=tail), *tail_segments(tail)
    kept = check_moved(segments, part, AttentionParams(1.0))
    assert len(kept) < 35  # of 168


def check_moved(
    segments: tuple[SegmentSpec, ...], part: int, params: AttentionParams, n: int = 1
) -> list[object]:
    """The plans of batches of `n` tokens, each a new one."""
    sizes = {"n_kv_heads": 2, "head_dim": SHAPE[-1], "n_ctx": 4 * PAGE_TOKENS}
    cache = uniform_cache(NumpyArrays(), n_layers=1, segments=segments, **sizes)
    segment, other = cache.layers[0].segments[part], cache.new_sequence()
    run = PackedAttention()
    shape = n, *SHAPE
    attention, kept = TokenAttention(run, shape, segment, part, params), list[object]()
    steps = (range(start, start + 40) for start in (190, 250, 500, 540))
    for length in (*itertools.chain(*steps), 7, 8, 600, 599, 1023, 601, -601, -602):
        if length == -601:  # other pages
            cache.reserve(other, 1)
        batch = tokens(cache, min(abs(length), 4 * PAGE_TOKENS - n), n)
        launch, plan = attention(batch)
        rows = batch.segments[part]
        fresh, _, wanted = PackedAttention().prepared(shape, segment, rows, batch, params)
        if not wanted:
            assert launch is NOTHING
            continue
        assert said(launch, plan) == said(*wanted, fresh)
        if not kept or kept[-1] is not plan:
            kept.append(plan)
    return kept


def test_rotations_of_one_token() -> None:
    """They have the bits that many of them have."""
    rope, arrays = RopeSpec(20, interleaved=False), NumpyArrays()
    freqs = rope_frequencies(rope)
    many = rope_table(freqs, np.arange(100_000, 100_100), rope, arrays)
    tokens = TokenRotations(freqs, rope, arrays)
    for i in (0, 1, 2, 50, 99, 3):
        one = tokens.table(100_000 + i)
        alone = rope_table(freqs, np.array([100_000 + i]), rope, arrays)
        for x, y, z in ((one.cos, many.cos, alone.cos), (one.sin, many.sin, alone.sin)):
            assert x.tobytes() == y[i : i + 1].tobytes() == z.tobytes()


def test_rotations_are_written_without_any_before() -> None:
    """For the first position of a text, too."""
    rope, arrays = RopeSpec(20, interleaved=False), NumpyArrays()
    freqs = rope_frequencies(rope)
    for position in (0, 4, 15, 16):
        wanted = rope_table(freqs, np.array([position]), rope, arrays)
        cos, sin = np.zeros_like(wanted.cos), np.zeros_like(wanted.sin)
        TokenRotations(freqs, rope, arrays).put(position, cos[0].data, sin[0].data)
        assert cos.tobytes() == wanted.cos.tobytes()
        assert sin.tobytes() == wanted.sin.tobytes()
