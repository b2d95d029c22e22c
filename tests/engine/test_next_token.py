"""Generated tokens that follow one another in a page, for which no batch is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from localkv.cache.arrays import Batch
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS, SegmentSpec
from localkv.cache.pages import Sequence
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.recorded import NextTokens
from localkv.kernels.backend import run_nothing_next
from localkv.model import Transformer
from support.forward import new_cache

Parts = list[tuple[Sequence, list[int]]]
PACKED = CacheConfig(type_k="q8_0", type_v="q4_0", kv_sink=4, kv_tail=0, n_ctx=2 * PAGE_TOKENS)
TAILED = replace(PACKED, kv_tail=64)


def said(engine: Engine, other: Engine) -> list[bytes]:
    """The logits of generated tokens, in many places.

    They go into another page, behind tokens that were taken back, beside another cache's tokens,
    and behind a prompt that begins like the last one. Several come at once, and some are taken
    back.
    """
    found = list[bytes]()
    rng = np.random.default_rng(1)

    def generate(n: int, engine: Engine = engine) -> None:
        for token in rng.integers(5, 40, n).tolist():
            found.append(engine.evaluate([token], generated=True).tobytes())

    engine.evaluate([*range(5, 35)] * 8, generated=False)
    other.evaluate([9, 8, 7])
    generate(30)
    engine.truncate(len(engine.cached_ids) - 3)
    generate(4)
    for _ in range(3):
        generate(2)
        generate(2, other)
    prompt = engine.cached_ids[:200]
    engine.reset()
    engine.evaluate(prompt)
    generate(3)
    engine.truncate(150)
    engine.evaluate([11, 12, 13])
    generate(3)
    for n in (3, 3, 5, 3, 1, 3, 5, 9, 3, 9, 3, 3, *[9] * 10):  # also beyond the end of a page
        ids = rng.integers(5, 40, n).tolist()
        found.append(engine.evaluate(ids, "all", generated=True).tobytes())
        engine.truncate(len(engine.cached_ids) - n // 3)
    return found


@pytest.mark.parametrize(
    ("name", "cache", "n_quick"),
    [
        ("llama", PACKED, 55),
        pytest.param("llama", TAILED, 0, marks=pytest.mark.slow),
        pytest.param("gemma3", CacheConfig(n_ctx=2 * PAGE_TOKENS), 55, marks=pytest.mark.slow),
        ("gemma4", CacheConfig(n_ctx=2 * PAGE_TOKENS), 55),
        ("qwen35", CacheConfig(n_ctx=2 * PAGE_TOKENS), 40),
        pytest.param("plm", CacheConfig(n_ctx=2 * PAGE_TOKENS), 0, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_batches(
    load: Callable[[str], Transformer], name: str, cache: CacheConfig, n_quick: int
) -> None:
    model = load(name)
    made = []

    def run_next(*args):
        out = model.backend.run_next(*args)
        made.append(out is not None)
        return out

    results = []
    for run in (run_next, run_nothing_next):
        backend = replace(model.backend, run_next=run)
        each = Transformer(model.config, model.weights, backend)
        engines = [Engine(each, cache, n_batch=256) for _ in range(2)]
        results.append(said(*engines))
    assert results[0] == results[1]
    assert sum(made) >= n_quick
    assert bool(sum(made)) == bool(n_quick)


@pytest.mark.parametrize(
    ("name", "sink", "n_least"), [("llama", 4, 8), ("llama", 250, 2), ("qwen35", 0, 8)]
)
def test_tokens_of_several_texts(
    load: Callable[[str], Transformer], name: str, sink: int, n_least: int
) -> None:
    """Sequences generate one token each, or verify some, at different places in their pages.

    With the larger sink some see only that.
    """
    model, rng = load(name), np.random.default_rng(3)
    other = Transformer(model.config, model.weights, model.backend)
    segments = [SegmentSpec("q8_0", "q4_0", first) for first in dict.fromkeys((0, sink))]
    caches = [new_cache(model, *segments, n_ctx=2 * PAGE_TOKENS, n_sequences=3) for _ in range(2)]
    texts = [[cache.new_sequence() for _ in range(3)] for cache in caches]
    next_tokens, n_quick = NextTokens(model, caches[0]), 0

    def evaluated(
        runner: Transformer, cache: KVCache, parts: Parts, *, generated: bool
    ) -> tuple[Batch, bytes]:
        batch = cache.batch(parts, logits="all", generated=generated)
        return batch, runner.forward(batch, cache).tobytes()

    shapes = [(240, 30, 247), *[(1, 1, 1)] * 12, (1, 3, 1), (1, 3, 1), (2, 1, 1), (1, 3, 1)]
    for step, shape in enumerate(shapes):
        ids = [rng.integers(5, 40, n).tolist() for n in shape]
        parts = [list(zip(sequences, ids, strict=True)) for sequences in texts]
        quick = next_tokens.logits(parts[0]) if step else None
        if quick is None:
            batch, found = evaluated(model, caches[0], parts[0], generated=step > 0)
            if step:
                next_tokens.note(texts[0], batch)
        else:
            found, n_quick = quick.tobytes(), n_quick + 1
        assert found == evaluated(other, caches[1], parts[1], generated=step > 0)[1]
        for sequence, n in zip((*texts[0], *texts[1]), 2 * shape, strict=True):
            sequence.length += n
    assert n_quick >= n_least
