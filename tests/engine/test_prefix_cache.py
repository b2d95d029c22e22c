"""Texts that begin alike: what is kept of them, what is shared, and what goes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.cache.pages import NO_SLOT
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.held_pages import check_pages

N_CTX = 1024
N_IDS = 96
RANDOM = np.random.default_rng(5).integers(N_IDS, size=(4, 900)).tolist()
CACHES = {
    "f16": CacheConfig(n_ctx=N_CTX),
    "packed": CacheConfig("q8_0", "q4_0", n_ctx=N_CTX),
    "tail": CacheConfig("q4_0", "q8_0", n_ctx=N_CTX, kv_tail=40, kv_sink=3),
    "groups": CacheConfig("q4_1c", "q4_1", n_ctx=N_CTX),
}
Load = Callable[[str], Transformer]


def answer(engine: Engine, ids: list[int], n: int = 4) -> tuple[list[int], int]:
    """Tokens drawn after a prompt, and how many of the prompt's were reused."""
    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=engine.model.config.n_vocab)
    generation = BatchEngine(engine).generate(ids, GenerationOptions(sampler=sampler, max_tokens=n))
    return list(generation), generation.stats.n_reused


@pytest.mark.parametrize("n_sequences", [1, 2])
def test_salts_share_no_rows(load: Load, n_sequences: int) -> None:
    """Each caller reuses what it evaluated itself, and tells nothing of what others have: neither
    what a text of theirs left, nor what the engine evaluated after it."""
    engine = Engine(
        load("llama"), CacheConfig(n_ctx=4 * N_CTX, n_sequences=n_sequences), n_batch=128
    )
    batch = BatchEngine(engine)
    ids, embedded = RANDOM[0][:290], RANDOM[1][:60]

    def reused(ids: list[int], salt: int) -> int:
        sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=engine.model.config.n_vocab)
        options = GenerationOptions(sampler=sampler, max_tokens=4, salt=salt)
        generation = batch.generate(ids, options)
        drawn.append(list(generation))
        return generation.stats.n_reused

    drawn = list[list[int]]()
    assert [reused(ids, salt) for salt in (1, 2, 0, 3)] == [0, 0, 0, 0]
    assert [reused(ids, salt) for salt in (1, 2, 0, 3)] == [289] * 4
    assert [reused([*ids[:200], 5], salt) for salt in (2, 4)] == [200, 0]
    assert drawn[:8] == [drawn[0]] * 8
    engine.embeddings([embedded], "mean")
    assert [reused([*embedded, 5], salt) for salt in (4, 2)] == [0, 0]
    check_pages(engine.cache)


@pytest.mark.parametrize("n_sequences", [1, 2])
def test_who_wants_no_reuse_evaluates_all(load: Load, n_sequences: int) -> None:
    engine = Engine(load("llama"), CacheConfig(n_ctx=N_CTX, n_sequences=n_sequences), n_batch=128)
    ids = RANDOM[0][:290]
    tokens, _ = answer(engine, ids)
    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=engine.model.config.n_vocab)
    options = GenerationOptions(sampler=sampler, max_tokens=4, reuses=False)
    generation = BatchEngine(engine).generate(ids, options)
    assert (list(generation), generation.stats.n_reused) == (tokens, 0)
    assert answer(engine, ids) == (tokens, 289)


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_text_before_the_last_is_still_there(load: Load, cache: CacheConfig) -> None:
    """All but its last token, wherever in a page it ends; and its continuation has the same bits
    as in a cache of its own."""
    engine = Engine(load("llama"), cache, n_batch=128)
    first, second = RANDOM[0][:290], RANDOM[0][:200] + RANDOM[1][:90]
    fresh = [answer(Engine(load("llama"), cache, n_batch=128), ids)[0] for ids in (first, second)]
    assert answer(engine, first) == (fresh[0], 0)
    assert answer(engine, second) == (fresh[1], 200)
    assert answer(engine, first) == (fresh[0], 289)
    assert answer(engine, second) == (fresh[1], 289)
    check_pages(engine.cache)


def test_texts_share_pages_until_they_differ(load: Load) -> None:
    engine = Engine(load("llama"), CACHES["packed"], n_batch=256)
    answer(engine, RANDOM[0][:600], 1)
    pool = engine.cache.pools[0]
    assert len(pool.free) == 1
    answer(engine, RANDOM[0][:520] + RANDOM[1][:50], 1)
    assert len(pool.free) == 0
    assert sorted(pool.n_holders) == [1, 1, 2, 2]
    assert answer(engine, RANDOM[2][:500], 1)[1] == 0  # there is only room for it alone
    assert len(engine.slot.prefixes.texts) == 0
    assert engine.slot.prefixes.n_dropped == 2
    check_pages(engine.cache)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("exact", [True, False])
def test_any_order_of_texts(load: Load, exact: bool, data: st.DataObject) -> None:
    """Prompts that begin like others, of a sum of lengths far above the context."""
    names = st.sampled_from(["f16", "packed", "tail", "groups"])
    cache = CACHES[data.draw(names)]
    engine = Engine(load("llama"), cache, n_batch=256, exact=exact)
    known = [RANDOM[0]]
    for number in range(1, 7):
        base = data.draw(st.sampled_from(known))
        n_shared = data.draw(st.integers(0, min(len(base), 700)))
        ids = base[:n_shared] + RANDOM[number % 4][: data.draw(st.integers(1, 280))]
        drawn, _ = answer(engine, ids)
        known.append(ids + drawn)
        check_pages(engine.cache)
        if exact:
            assert drawn == answer(Engine(load("llama"), cache, n_batch=256), ids)[0]
    engine.reset()
    assert [len(pool.free) for pool in engine.cache.pools] == [
        pool.n_pages for pool in engine.cache.pools
    ]


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("gemma3", 289),
        pytest.param("qwen35", 282, marks=pytest.mark.slow),
        pytest.param("plm", 289, marks=pytest.mark.slow),
    ],
)
def test_windows_states_and_latents(load: Load, name: str, least: int) -> None:
    """Recurrent layers go on from a checkpoint shortly before the end of the prompt."""
    cache = CacheConfig("q8_0", "q8_0", n_ctx=N_CTX)
    engine = Engine(load(name), cache, n_batch=128)
    first, second = RANDOM[0][:290], RANDOM[1][:290]
    fresh = [answer(Engine(load(name), cache, n_batch=128), ids)[0] for ids in (first, second)]
    assert answer(engine, first) == (fresh[0], 0)
    assert answer(engine, second) == (fresh[1], 0)
    assert answer(engine, first) == (fresh[0], least)
    assert answer(engine, second) == (fresh[1], least)
    check_pages(engine.cache)
    if engine.cache.states:
        assert {text.sequence.slot for text in engine.slot.prefixes.texts} == {NO_SLOT}


def test_states_take_no_more_memory_than_is_planned(load: Load) -> None:
    """All texts together have as many checkpoints as one may have."""
    engine = Engine(load("qwen35"), CacheConfig(n_ctx=N_CTX, ctx_checkpoints=3), n_batch=128)
    states = engine.cache.states
    for i in range(6):
        answer(engine, RANDOM[i % 3][: 100 + 20 * i])
        assert 1 <= states.n_checkpoints <= 3
    assert answer(engine, RANDOM[2][:200])[1] > 0
    assert all(text.sequence.kept for text in engine.slot.prefixes.texts)


def test_generations_in_turn_evaluate_nothing_twice(load: Load) -> None:
    """Two that take turns token by token keep their rows."""
    model = load("llama")
    engine = Engine(model, CACHES["packed"], n_batch=256)
    evaluated = list[int]()
    forward = engine.slot.forward
    engine.slot.forward = lambda model, ids, *a, **k: (  # type: ignore[method-assign]
        evaluated.append(len(ids)),
        forward(model, ids, *a, **k),
    )[1]
    prompts = [RANDOM[0][:30], RANDOM[0][:20] + RANDOM[1][:20]]
    samplers = [Sampler(SamplingParams(temperature=0.0), n_vocab=N_IDS) for _ in prompts]
    both = [
        BatchEngine(engine).generate(ids, GenerationOptions(sampler=sampler, max_tokens=6))
        for ids, sampler in zip(prompts, samplers, strict=True)
    ]
    drawn = [[next(generation) for generation in both] for _ in range(6)]
    assert evaluated == [30, 20] + [1] * 10
    fresh = [answer(Engine(model, CACHES["packed"], n_batch=256), ids, 6)[0] for ids in prompts]
    assert [list(tokens) for tokens in zip(*drawn, strict=True)] == fresh


def test_an_exception_leaves_nothing(load: Load) -> None:
    engine = Engine(load("llama"), CACHES["packed"], n_batch=256)
    for ids in RANDOM[:3]:
        answer(engine, ids[:100])

    def fail() -> None:
        engine.slot.prefixes.texts[0].sequence.pages[0].append(3)  # half done
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.slot.turn(fail)
    assert answer(engine, RANDOM[0][:100])[1] == 0
    check_pages(engine.cache)


def test_texts_that_go_leave_no_page_behind(load: Load) -> None:
    """Where the pages of a tail begin with rows before the first token."""
    engine = Engine(load("llama"), CacheConfig("kv2_1c", "kv2_1", n_ctx=600), n_batch=128)
    for start in range(6):
        answer(engine, RANDOM[start % 4][start : start + 260], 1)
        check_pages(engine.cache)
