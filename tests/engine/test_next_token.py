"""Generated tokens that follow one another in a page, for which no batch is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from localkv.cache.layout import PAGE_TOKENS
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.kernels.backend import run_nothing_next
from localkv.model import Transformer

PACKED = CacheConfig(type_k="q8_0", type_v="q4_0", kv_sink=4, kv_tail=0, n_ctx=2 * PAGE_TOKENS)
TAILED = replace(PACKED, kv_tail=64)


def said(engine: Engine, other: Engine) -> list[bytes]:
    """The logits of generated tokens: into another page, behind tokens that were taken back,
    beside those of another cache, and behind a prompt that begins like the last one."""
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
    return found


@pytest.mark.parametrize(
    ("name", "cache", "n_quick"),
    [
        ("llama", PACKED, 40),
        pytest.param("llama", TAILED, 0, marks=pytest.mark.slow),
        pytest.param("gemma3", CacheConfig(n_ctx=2 * PAGE_TOKENS), 40, marks=pytest.mark.slow),
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
