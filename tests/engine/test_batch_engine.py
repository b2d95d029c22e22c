"""Many requests at the same time: each gets the tokens that it would get alone."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any, cast

import pytest

from localkv.cache.layout import cache_bytes, group_layouts
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine, Pages, QueueFullError
from localkv.engine.engine import Engine
from localkv.engine.generation import Generation, GenerationOptions
from localkv.engine.prefix import Text
from localkv.engine.scheduler import AHEAD
from localkv.engine.speculation.speculator import Speculator
from localkv.errors import ContextOverflowError, LocalKVError
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.held_pages import check_pages

N_IDS = 96
CACHE = CacheConfig("q8_0", "q4_0", n_ctx=1024)
CACHES = {
    "f16": replace(CACHE, type_k="f16", type_v="f16"),
    "packed": CACHE,
    "tail": replace(CACHE, kv_tail=40, kv_sink=3),
    "groups": replace(CACHE, type_k="q4_1c", type_v="q4_1"),
}
Load = Callable[[str], Transformer]


def sampler(model: Transformer, seed: int) -> Sampler:
    params = SamplingParams(seed=seed, temperature=0.0 if seed % 2 else 1.0)
    return Sampler(params, n_vocab=model.config.n_vocab)


def prompts(n: int, most: int, seed: int = 0) -> list[list[int]]:
    """Some of which begin alike."""
    rng = random.Random(seed)
    made = [[rng.randrange(N_IDS) for _ in range(rng.randint(1, most))]]
    while len(made) < n:
        base = rng.choice(made)
        kept = base[: rng.randint(0, len(base))] if rng.random() < 0.6 else []
        n_new = rng.randint(1, most)
        made.append((kept + [rng.randrange(N_IDS) for _ in range(n_new)])[:most])
    return made


def alone(model: Transformer, cache: CacheConfig, ids: list[int], seed: int, n: int) -> list[int]:
    engine = Engine(model, replace(cache, n_sequences=1), n_batch=64)
    return list(
        BatchEngine(engine).generate(
            ids, GenerationOptions(sampler=sampler(model, seed), max_tokens=n)
        )
    )


def together(batch: BatchEngine, generations: list[Generation]) -> list[list[int]]:
    """The tokens of all, read as they come."""
    tokens = [list[int]() for _ in generations]
    while not batch.is_idle:
        batch.step()
        for one, drawn in zip(generations, tokens, strict=True):
            drawn += [next(one) for _ in range(one.n_ready)]
    return [drawn + list(one) for one, drawn in zip(generations, tokens, strict=True)]


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("llama", "packed"),
        pytest.param("llama", "f16", marks=pytest.mark.slow),
        pytest.param("llama", "tail", marks=pytest.mark.slow),
        pytest.param("llama", "groups", marks=pytest.mark.slow),
        pytest.param("gemma3", "packed", marks=pytest.mark.slow),
        pytest.param("qwen35", "packed", marks=pytest.mark.slow),
        pytest.param("plm", "packed", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_each_alone(load: Load, name: str, cache: str) -> None:
    """Whoever comes when, and whatever begins alike; and all pages come back."""
    model, config = load(name), replace(CACHES[cache], n_sequences=3)
    engine = Engine(model, config, n_batch=64)
    batch = BatchEngine(engine, step_ms=5.0)
    texts = prompts(8, 400)
    generations = list[Generation]()
    for seed, ids in enumerate(texts):
        generations.append(
            batch.generate(ids, GenerationOptions(sampler=sampler(model, seed), max_tokens=12))
        )
        for _ in range(seed):
            batch.step()
    tokens = together(batch, generations)
    for seed, (ids, got) in enumerate(zip(texts, tokens, strict=True)):
        assert got == alone(model, config, ids, seed, 12)
        assert generations[seed].finish_reason == "length"
    assert batch.is_idle
    check_pages(engine.cache)
    engine.reset()
    assert all(len(pool.free) == pool.n_pages for pool in engine.cache.pools)
    assert batch.stats.n_generated == 96
    assert batch.stats.n_prompt == sum(map(len, texts)) - batch.stats.n_reused


def test_who_gives_pages_back_goes_on_with_the_same_bits(load: Load) -> None:
    """Prompts as prompts and drawn tokens as drawn tokens, from rows that are kept or not."""
    model = load("llama")
    config = replace(CACHE, n_sequences=3, n_tokens=5 * 256)
    engine = Engine(model, config, n_batch=64)
    batch = BatchEngine(engine)
    texts = prompts(3, 220, seed=3)
    generations = [
        batch.generate(ids, GenerationOptions(sampler=sampler(model, seed), max_tokens=300))
        for seed, ids in enumerate(texts)
    ]
    tokens = together(batch, generations)
    assert batch.stats.n_preempted
    for seed, (ids, got) in enumerate(zip(texts, tokens, strict=True)):
        assert got == alone(model, config, ids, seed, 300)


def test_it_ends_when_it_is_cancelled_or_late(load: Load) -> None:
    model, clock = load("llama"), [0.0]
    engine = Engine(model, replace(CACHE, n_sequences=4), n_batch=64)
    batch = BatchEngine(engine, clock=lambda: clock[0])
    cancel = Event()
    arguments = [{"cancel": cancel}, {"timeout": 5.0}, {}, {"max_tokens": 0}]
    generations = [
        batch.generate(
            [1, 2, 3], GenerationOptions(sampler=sampler(model, 1), **{"max_tokens": 20, **more})
        )
        for more in arguments
    ]
    assert [next(generation, None) is None for generation in generations] == [False] * 3 + [True]
    cancel.set()
    clock[0] = 6.0
    generations[2].close()
    assert [list(generation) for generation in generations] == [[]] * 4
    assert [one.finish_reason for one in generations] == ["cancelled"] * 3 + ["length"]
    assert batch.is_idle
    check_pages(engine.cache)


@pytest.mark.parametrize("way", ["cancel", "close"])
@pytest.mark.parametrize("state", ["queued", "in its prompt", "generating", "not read"])
def test_whose_pages_are_spare_within_two_steps(load: Load, state: str, way: str) -> None:
    """A request that is not wanted any more, wherever it is: another one can have its pages."""
    model, cancel = load("llama"), Event()
    n_pages = 4
    config = replace(CACHE, n_sequences=2, n_tokens=n_pages * 256)
    batch = BatchEngine(Engine(model, config, n_batch=64), n_parallel=2)
    talking = batch.generate(
        [1, 2, 3], GenerationOptions(sampler=sampler(model, 1), max_tokens=200)
    )
    others = [talking]
    if state == "queued":
        others.append(
            batch.generate([4, 5], GenerationOptions(sampler=sampler(model, 3), max_tokens=200))
        )
    ids = [i % 90 for i in range(400)]
    one = batch.generate(
        ids, GenerationOptions(sampler=sampler(model, 2), max_tokens=300, cancel=cancel)
    )

    def step() -> None:
        batch.step()
        for other in others:
            for _ in range(other.n_ready):
                next(other)
        for _ in range(one.n_ready if state == "generating" else 0):
            next(one)

    wanted = {"queued": 3, "in its prompt": 3, "generating": 30, "not read": AHEAD + 25}[state]
    for _ in range(wanted):
        step()
    held = {"queued": 0, "in its prompt": 1}.get(state, 2)
    assert batch.pages.running == len(others) + held
    if way == "cancel":
        cancel.set()
    else:
        one.close()
    for _ in range(2):
        step()
    pages = batch.pages
    assert pages.running == len(others)
    assert pages.kept + sum(len(pool.free) for pool in batch.engine.cache.pools) == (
        n_pages - len(others)
    )
    assert one.finish_reason == "cancelled" or next(one, None) is None
    if state != "queued":
        follow = batch.generate(
            [7] * 500, GenerationOptions(sampler=sampler(model, 4), max_tokens=3)
        )
        assert len(list(follow)) == 3
    check_pages(batch.engine.cache)


@pytest.mark.parametrize("error", [LocalKVError("NaN"), OverflowError("NaN"), MemoryError("NaN")])
def test_what_goes_wrong_while_one_is_drawn_ends_it_alone(load: Load, error: Exception) -> None:
    model = load("llama")
    batch = BatchEngine(Engine(model, replace(CACHE, n_sequences=2), n_batch=64))

    class Failing(Sampler):
        def sample(self, logits: object) -> int:
            raise error

    failing = Failing(SamplingParams(), n_vocab=N_IDS)
    ids = [5, 6, 7]
    both = [
        batch.generate(ids, GenerationOptions(sampler=failing, max_tokens=5)),
        batch.generate(ids, GenerationOptions(sampler=sampler(model, 1), max_tokens=5)),
    ]
    with pytest.raises(type(error), match="NaN"):
        next(both[0])
    assert both[0].finish_reason == "cancelled"
    assert list(both[1]) == alone(model, CACHE, ids, 1, 5)


def test_an_exception_leaves_no_wrong_rows(load: Load) -> None:
    """Ctrl-C in the middle of a step: all go on, as if nothing had been."""
    model = load("llama")
    engine = Engine(model, replace(CACHE, n_sequences=2), n_batch=64)
    batch = BatchEngine(engine)
    texts = [list(range(10, 80)), list(range(20, 40))]
    generations = [
        batch.generate(ids, GenerationOptions(sampler=sampler(model, 1), max_tokens=8))
        for ids in texts
    ]
    for _ in range(4):
        batch.step()
    draw = generations[1].draw

    def interrupted(logits: object) -> bool:
        generations[1].draw = draw  # type: ignore[method-assign]
        raise KeyboardInterrupt

    generations[1].draw = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        batch.step()
    assert [list(one) for one in generations] == [alone(model, CACHE, ids, 1, 8) for ids in texts]
    check_pages(engine.cache)


@pytest.mark.parametrize("n_sequences", [1, 3])
@pytest.mark.parametrize("way", ["closed", "dropped", "collected"])
def test_a_generation_that_nobody_finishes_goes(load: Load, n_sequences: int, way: str) -> None:
    """Its request is in no list after the next step, whether it ran or waited."""
    model = load("llama")
    engine = Engine(model, replace(CACHE, n_sequences=n_sequences), n_batch=64)
    batch = BatchEngine(engine, most_waiting=1)
    first, second = list(range(70)), [*list(range(40)), 3, 4]

    def begun(ids: list[int]) -> Generation:
        return batch.generate(ids, GenerationOptions(sampler=sampler(model, 1), max_tokens=20))

    runs = begun(first)
    tokens = [next(runs) for _ in range(3)]
    waits = begun(second)
    with pytest.raises(QueueFullError):
        begun(second)
    requests = [runs.request, waits.request]
    if way == "closed":
        runs.close()
        waits.close()
    if way == "collected":
        ring = [runs, waits]
        ring.append(ring)  # type: ignore[arg-type]
        del ring
    del runs, waits
    gc.collect()
    assert batch.is_idle
    following = begun(second)
    drawn = [next(following)]
    assert batch.scheduler.running == [following.request]
    assert batch.scheduler.waiting == []
    assert [one.state for one in requests] == ["done", "done"]
    assert drawn + list(following) == alone(model, CACHE, second, 1, 20)
    assert tokens == alone(model, CACHE, first, 1, 3)
    assert batch.scheduler.running == []
    check_pages(engine.cache)


@pytest.mark.parametrize("n_sequences", [1, 2])
@pytest.mark.parametrize("is_interrupted", [True, False])
def test_the_text_after_one_that_broke_off_is_right(
    load: Load, n_sequences: int, is_interrupted: bool
) -> None:
    """Ctrl-C between the evaluation of a token and its draw, or a reader that leaves."""
    model = load("llama")
    engine = Engine(model, replace(CACHE, n_sequences=n_sequences), n_batch=64)
    batch = BatchEngine(engine)
    ids, other = list(range(10, 80)), [*list(range(10, 50)), 7, 8]
    breaks = batch.generate(ids, GenerationOptions(sampler=sampler(model, 0), max_tokens=12))
    tokens = [next(breaks) for _ in range(4)]
    if is_interrupted:

        def interrupted(logits: object) -> bool:
            raise KeyboardInterrupt

        breaks.draw = breaks.take = interrupted  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            list(breaks)
    else:
        breaks.close()
    assert breaks.finish_reason == "cancelled"
    assert list(breaks) == []
    assert batch.is_idle
    assert batch.scheduler.running == batch.scheduler.waiting == []
    following = batch.generate(other, GenerationOptions(sampler=sampler(model, 1), max_tokens=8))
    assert list(following) == alone(model, CACHE, other, 1, 8)
    assert following.stats.n_reused == (0 if is_interrupted else 40)
    again = batch.generate(ids, GenerationOptions(sampler=sampler(model, 0), max_tokens=12))
    assert list(again) == alone(model, CACHE, ids, 0, 12)
    assert list(again) == []
    assert breaks.ids[len(ids) :] == tokens == again.ids[len(ids) :][:4]
    check_pages(engine.cache)


def test_the_engine_itself_serves_in_between(load: Load) -> None:
    """A text alone, and logits, while others run; all share what is there of a prompt."""
    model = load("llama")
    engine = Engine(model, replace(CACHE, n_sequences=2), n_batch=64)
    batch = BatchEngine(engine)
    ids = list(range(90))
    first = batch.generate(ids, GenerationOptions(sampler=sampler(model, 1), max_tokens=6))
    head = [next(first) for _ in range(3)]
    generation = BatchEngine(engine).generate(
        ids, GenerationOptions(sampler=sampler(model, 1), max_tokens=6)
    )
    got = list(generation)
    assert generation.stats.n_reused == 0  # rows of a text that runs are its own
    logits = engine.logits(ids[:20])
    assert head + list(first) == got == alone(model, CACHE, ids, 1, 6)
    assert logits.tobytes() == Engine(model, CACHE, n_batch=64).logits(ids[:20]).tobytes()


def test_what_never_fits_is_refused(load: Load) -> None:
    model = load("llama")
    engine = Engine(model, replace(CACHE, n_sequences=2, n_tokens=512), n_batch=64)
    batch = BatchEngine(engine)
    with pytest.raises(ContextOverflowError, match="600 tokens, but the cache holds 512"):
        batch.generate([1] * 600, GenerationOptions(sampler=sampler(model, 1)))
    generation = batch.generate([1] * 500, GenerationOptions(sampler=sampler(model, 1)))
    assert len(list(generation)) == 12
    assert generation.context_full
    few = BatchEngine(engine, most_waiting=1)
    waits = few.generate([1], GenerationOptions(sampler=sampler(model, 1)))
    with pytest.raises(QueueFullError, match="1 request in the queue"):
        few.generate([2], GenerationOptions(sampler=sampler(model, 1)))
    assert waits.request.state == "waiting"
    with pytest.raises(LocalKVError, match="3 requests at a time do not fit a cache of 2"):
        BatchEngine(engine, n_parallel=3)


def test_who_pauses_keeps_nobody_waiting(load: Load) -> None:
    """A generation that nobody reads is some tokens ahead, and then gives its pages to others."""
    model = load("llama")
    config = replace(CACHE, n_sequences=2, n_tokens=4 * 256)
    batch = BatchEngine(Engine(model, config, n_batch=64))
    texts = prompts(3, 200, seed=4)
    paused = batch.generate(texts[0], GenerationOptions(sampler=sampler(model, 0), max_tokens=400))
    head = [next(paused)]
    for seed in (1, 2):
        generation = batch.generate(
            texts[seed], GenerationOptions(sampler=sampler(model, seed), max_tokens=500)
        )
        assert list(generation) == alone(model, config, texts[seed], seed, 500)
        assert paused.n_ready == AHEAD
    assert head + list(paused) == alone(model, config, texts[0], 0, 400)


def test_pages_are_told(load: Load) -> None:
    model = load("llama")
    engine = Engine(model, replace(CACHE, n_sequences=3), n_batch=512)
    batch = BatchEngine(engine, step_ms=1e6)
    ids = list(range(90)) * 6
    generations = [
        batch.generate([*ids, i], GenerationOptions(sampler=sampler(model, 1), max_tokens=3))
        for i in range(3)
    ]
    for _ in range(3):
        batch.step()
    assert batch.pages == Pages(running=5, shared=2, kept=0, lost=0)
    together(batch, generations)
    assert batch.pages == Pages(running=0, shared=2, kept=5, lost=0)
    assert batch.stats.n_reused == 2 * 512  # the first one's first step; 28 are not waited for
    batch.engine.cache.pools[0].take()  # and tell nobody
    assert batch.pages == Pages(running=0, shared=2, kept=5, lost=1)


def test_threads_share_steps(load: Load) -> None:
    """Each reads one generation; a step serves all that wait."""
    model = load("llama")
    batch = BatchEngine(Engine(model, replace(CACHE, n_sequences=4), n_batch=64))
    texts = [[1, 2, 3, i] for i in range(4)]
    generations = [
        batch.generate(ids, GenerationOptions(sampler=sampler(model, i), max_tokens=60))
        for i, ids in enumerate(texts)
    ]
    with ThreadPoolExecutor(4) as pool:
        tokens = list(pool.map(list, generations))
    assert tokens == [alone(model, CACHE, ids, i, 60) for i, ids in enumerate(texts)]
    assert batch.stats.n_generated == 240
    assert batch.stats.n_steps < 120


def test_threads_may_ask_at_any_time(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same time as others, and while a step looks at those that are there."""
    model = load("llama")
    batch = BatchEngine(Engine(model, replace(CACHE, n_sequences=4), n_batch=64))

    def slow(engine: Engine, ids: Any, *values: Any) -> Text:
        time.sleep(0.05)
        return Text(list(ids), len(ids))

    def ask(i: int) -> Generation:
        return batch.generate(
            [1, 2, 3, i], GenerationOptions(sampler=sampler(model, i), max_tokens=5)
        )

    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(Engine, "text_of", slow)
        generations = list(pool.map(ask, range(4)))
    assert {one.request.number for one in generations} == {0, 1, 2, 3}

    class Interrupted:
        @property
        def is_resting(self) -> bool:
            generations[0].speculator = None
            generations.append(ask(len(generations)))
            return True

    generations[0].speculator = cast("Speculator", Interrupted())
    batch.step()
    for i, one in enumerate(generations):
        assert list(one) == alone(model, CACHE, [1, 2, 3, i], i, 5)


def test_as_many_as_are_planned_run_at_the_same_time(load: Load) -> None:
    """Full contexts of all sequences, to the page, and what is counted is what is allocated."""
    model = load("llama")
    config = replace(CACHE, n_ctx=512, n_sequences=3)
    engine = Engine(model, config, n_batch=256)
    layouts = group_layouts(config, model.config.groups)
    counted = cache_bytes(layouts, n_ctx=512, n_batch=256, n_sequences=3)
    assert (engine.cache.n_bytes("k"), engine.cache.n_bytes("v")) == counted
    batch = BatchEngine(engine)
    generations = [
        batch.generate([i] * 500, GenerationOptions(sampler=sampler(model, i))) for i in range(3)
    ]
    tokens = together(batch, generations)
    assert [len(drawn) for drawn in tokens] == [12] * 3
    assert batch.stats.n_preempted == 0
    assert batch.stats.n_steps < 20


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("llama", "groups"),
        *(pytest.param("llama", cache, marks=pytest.mark.slow) for cache in ("f16", "tail")),
        *(
            pytest.param(name, "packed", marks=pytest.mark.slow)
            for name in ("gemma3", "qwen35", "plm")
        ),
    ],
)
@pytest.mark.parametrize("n_batch", [1, 3, 15])
def test_small_batches(load: Load, name: str, cache: str, n_batch: int) -> None:
    """Texts together, and in turns in which they lose their rows, as in large batches."""
    model, config = load(name), replace(CACHES[cache], n_sequences=3)
    engine = Engine(model, config, n_batch=n_batch)
    engine.warm_up()
    texts = prompts(3, 90, seed=5)
    batch = BatchEngine(engine)
    asked = [
        batch.generate(ids, GenerationOptions(sampler=sampler(model, seed), max_tokens=24))
        for seed, ids in enumerate(texts)
    ]
    tokens = together(batch, asked)
    assert tokens == [alone(model, config, ids, seed, 24) for seed, ids in enumerate(texts)]
    lone = Engine(model, replace(config, n_sequences=1), n_batch=n_batch)
    streams = [
        BatchEngine(lone).generate(
            ids, GenerationOptions(sampler=sampler(model, seed), max_tokens=24)
        )
        for seed, ids in enumerate(texts)
    ]
    in_turns = [next(stream) for _ in range(24) for stream in streams]
    assert [in_turns[i::3] for i in range(3)] == tokens
