"""Decoding from fixed buffers: the same tokens as batch by batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import GroupLayout, SegmentSpec
from localkv.cache.pages import Sequence
from localkv.engine.recorded import MANY_DRAWS, DecodeLoop
from localkv.errors import LocalKVError
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from support.random_model import RandomModel

SEGMENTS = {
    "one": [SegmentSpec("q8_0", "q4_0")],
    "first tokens apart": [SegmentSpec("f16", "f16"), SegmentSpec("q8_0", "f16", 20)],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    path = RandomModel().write(tmp_path_factory.mktemp("loop") / "model.gguf")
    return load_model(path, reference_backend())[0]


def new_cache(model: Transformer, segments: list[SegmentSpec], n_ctx: int) -> KVCache:
    """Pages are handed out in an odd order; rows behind the last must not matter but be finite."""
    layouts = [GroupLayout(group, tuple(segments)) for group in model.config.groups]
    cache = KVCache(layouts, n_ctx=n_ctx, arrays=model.backend.arrays)
    for pool in cache.pools:
        pool.free = pool.free[1::2] + pool.free[::2]
    for layer in cache.layers:
        for segment in layer.segments:
            for plane in (*segment.k, *segment.v):
                plane.fill_(0x3C)
    return cache


def evaluate(model: Transformer, cache: KVCache, sequence: Sequence, ids: list[int]) -> Tensor:
    out = model.forward(cache.batch([(sequence, ids)]), cache)
    sequence.length += len(ids)
    return out


def greedy(logits: Tensor, random: Tensor) -> Tensor:
    return logits.argmax(-1)


def batch_by_batch(
    model: Transformer, segments: list[SegmentSpec], prompt: list[int], n_tokens: int
) -> list[int]:
    cache = new_cache(model, segments, 700)
    sequence = cache.new_sequence()
    ids = [int(evaluate(model, cache, sequence, prompt).argmax())]
    while len(ids) < n_tokens:
        ids.append(int(evaluate(model, cache, sequence, ids[-1:]).argmax()))
    return ids


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("n_prompt", [3, 250, 510])
def test_tokens_are_those_of_separate_batches(
    model: Transformer, segments: list[SegmentSpec], n_prompt: int
) -> None:
    """Across the first tokens' segment, pages and buckets."""
    prompt = [(i * 37 + 11) % 96 for i in range(n_prompt)]
    wanted = batch_by_batch(model, segments, prompt, 30)
    cache = new_cache(model, segments, 700)
    sequence = cache.new_sequence()
    first = int(evaluate(model, cache, sequence, prompt).argmax())
    loop = DecodeLoop(model, cache)
    assert [first, *loop.tokens(sequence, first, greedy, seed=0, number=0, limit=29)] == wanted
    assert sequence.length == n_prompt


@pytest.mark.slow
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_logits_are_those_of_a_batch(model: Transformer, segments: list[SegmentSpec]) -> None:
    ids = [(i * 31 + 5) % 96 for i in range(300)]
    caches = [new_cache(model, segments, 700) for _ in range(2)]
    ours, theirs = (cache.new_sequence() for cache in caches)
    loop = DecodeLoop(model, caches[0])
    loop.warm_up(ours)
    assert ours.length == 0
    for start in (0, 100):
        evaluate(model, caches[0], ours, ids[start : start + 100])
        evaluate(model, caches[1], theirs, ids[start : start + 100])
    for token in ids[200:]:
        # sums over longer tables round differently, and so may a code of a packed row
        want = evaluate(model, caches[1], theirs, [token])
        torch.testing.assert_close(loop.logits([ours], [token]), want, rtol=0, atol=1e-4)
        ours.length += 1


def test_a_sequence_that_went_back_is_read_from_its_new_pages(model: Transformer) -> None:
    ids = [(i * 29 + 3) % 96 for i in range(520)]
    cache = new_cache(model, SEGMENTS["one"], 700)
    loop, sequence, other = DecodeLoop(model, cache), cache.new_sequence(), cache.new_sequence()
    evaluate(model, cache, sequence, ids)
    loop.logits([sequence], [7])
    cache.truncate(sequence, 0)
    cache.reserve(other, 1)  # takes a page that was ours
    evaluate(model, cache, sequence, ids[:300])
    fresh = new_cache(model, SEGMENTS["one"], 700)
    expected = fresh.new_sequence()
    evaluate(model, fresh, expected, ids[:300])
    torch.testing.assert_close(loop.logits([sequence], [9]), evaluate(model, fresh, expected, [9]))


def test_draws_are_counted_and_old_ones_forgotten(model: Transformer) -> None:
    cache = new_cache(model, SEGMENTS["one"], 300)
    loop, sequence = DecodeLoop(model, cache), cache.new_sequence()
    for key in range(2 * MANY_DRAWS):

        def count(logits: Tensor, random: Tensor, key: int = key) -> Tensor:
            return random.sum(0, keepdim=True) + key

        drawn = list(loop.tokens(sequence, 1, count, seed=50, number=2, limit=3))
        assert drawn == [52 + key, 53 + key, 54 + key]
    assert all(len(bucket.steps) <= MANY_DRAWS for bucket in loop._buckets.values())


def test_a_reader_may_stop_early_and_the_context_ends(model: Transformer) -> None:
    cache = new_cache(model, SEGMENTS["one"], 10)
    loop, sequence = DecodeLoop(model, cache), cache.new_sequence()
    tokens = loop.tokens(sequence, 1, greedy, seed=0, number=0, limit=100)
    got = [next(tokens) for _ in range(9)]
    assert len(got) == 9
    with pytest.raises(LocalKVError, match="context of 10"):
        list(tokens)
