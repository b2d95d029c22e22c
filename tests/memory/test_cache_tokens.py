"""The tokens of a cache that many requests share, from bytes and from free memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localkv import LLM
from localkv.cache.layout import PAGE_TOKENS
from localkv.config import CacheConfig
from localkv.errors import DoesNotFitError, UsageError
from localkv.loader.known_models import KNOWN_MODELS, shape_tensors
from localkv.memory.fit import tokens_in_bytes, tokens_that_fit
from localkv.memory.plan import ModelMemory
from localkv.system.machine_memory import Budget

GIB = 1 << 30
CACHE = CacheConfig("q8_0", "q4_0", n_ctx=32768, n_sequences=16)


def _memory() -> ModelMemory:
    tensors = shape_tensors("llama-1b", "q4_0")
    return ModelMemory(
        tensors, KNOWN_MODELS["llama-1b"].spec, backend="cpu", n_batch=512, n_threads=2
    )


def _bytes(n_tokens: int) -> int:
    plan = _memory().plan(replace(CACHE, n_tokens=n_tokens))
    return plan.cache_k + plan.cache_v


def test_as_many_tokens_as_fit_into_bytes():
    n_tokens = tokens_in_bytes(_memory(), CACHE, GIB)
    assert n_tokens % PAGE_TOKENS == 0
    assert _bytes(n_tokens) <= GIB < _bytes(n_tokens + PAGE_TOKENS)
    assert tokens_in_bytes(_memory(), CACHE, _bytes(512)) == 512
    assert tokens_in_bytes(_memory(), CACHE, 1000 * GIB) == 16 * 32768
    with pytest.raises(UsageError, match="K and V of 256 tokens take"):
        tokens_in_bytes(_memory(), CACHE, 1000)


def test_four_contexts_or_what_memory_has_room_for():
    memory = _memory()
    whole = 4 * CACHE.n_ctx
    assert tokens_that_fit(memory, CACHE, None) == whole
    needed = memory.plan(replace(CACHE, n_tokens=whole)).resident
    assert tokens_that_fit(memory, CACHE, Budget(needed, "free")) == whole
    fewer = tokens_that_fit(memory, CACHE, Budget(needed - _bytes(CACHE.n_ctx), "free"))
    assert fewer == 3 * CACHE.n_ctx
    assert tokens_that_fit(memory, CACHE, Budget(0, "free")) == CACHE.n_ctx
    two = replace(CACHE, n_sequences=2)
    assert tokens_that_fit(memory, two, None) == 2 * CACHE.n_ctx


def test_what_is_given_is_allocated(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    with LLM(tiny_model, n_ctx=2048, n_parallel=4, n_cache_bytes=1 << 20) as llm:
        allocated = llm.memory.cache_k + llm.memory.cache_v
        n_pages = sum(pool.n_pages for pool in llm.engine.cache.pools)
        assert allocated <= 1 << 20 < allocated * (n_pages + 1) // n_pages
        assert llm.cache.n_tokens == n_pages * PAGE_TOKENS
    with LLM(tiny_model, n_ctx=512, n_parallel=8, n_cache_tokens="fit") as llm:
        assert llm.cache.n_tokens == 2048
    monkeypatch.setattr("localkv.llm.free_memory", lambda backend: Budget(1000, "free"))
    with pytest.raises(DoesNotFitError):
        LLM(tiny_model, n_ctx=2048, n_parallel=4, n_cache_tokens="fit")
