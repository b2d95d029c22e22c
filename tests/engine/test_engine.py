"""Ids in, ids out: prefix reuse, cancelling, the ends of a generation."""

from __future__ import annotations

from dataclasses import replace
from threading import Event

import numpy as np
import pytest

from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import Generation, GenerationOptions
from localkv.errors import ContextOverflowError, LocalKVError
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.gpu.device_draw import device_draw
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.counting_sampler import CountingSampler
from support.random_model import RandomModel

PROMPT = [(i * 37 + 11) % 96 for i in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    path = RandomModel().write(tmp_path_factory.mktemp("engine") / "model.gguf")
    return load_model(path, cpu_backend())[0]


def new_engine(
    model: Transformer, n_ctx: int = 300, n_batch: int = 512, exact: bool = True
) -> Engine:
    return Engine(model, CacheConfig(n_ctx=n_ctx), n_batch=n_batch, exact=exact)


def recording_engine(model: Transformer) -> Engine:
    """One that decodes from fixed buffers and draws on the device, as on a GPU."""
    backend = replace(model.backend, records=True, draw=device_draw)
    engine = Engine(Transformer(model.config, model.weights, backend), CacheConfig(n_ctx=300))
    for layer in engine.cache.layers:
        for plane in (*layer.segments[0].k, *layer.segments[0].v):
            plane.zero_()  # the reference reads rows behind the last, and must not find NaN
    return engine


def greedy(**params: float) -> Sampler:
    return Sampler(SamplingParams(temperature=0.0, **params), n_vocab=96)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    path = RandomModel().write(tmp_path_factory.mktemp("reference") / "model.gguf")
    return load_model(path, reference_backend())[0]


def test_greedy_follows_the_logits(model: Transformer) -> None:
    """Each token is the best of the logits that the whole text so far gives."""
    generation = BatchEngine(new_engine(model)).generate(
        PROMPT, GenerationOptions(sampler=greedy(), max_tokens=12)
    )
    ids = list(generation)
    assert generation.finish_reason == "length"
    assert not generation.context_full
    logits = new_engine(model).logits(PROMPT + ids)
    best = logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert ids == best


@pytest.mark.parametrize("n_batch", [1, 7, 40, 64])
def test_chunked_prefill(model: Transformer, n_batch: int) -> None:
    want = list(
        BatchEngine(new_engine(model)).generate(
            PROMPT, GenerationOptions(sampler=greedy(), max_tokens=5)
        )
    )
    engine = new_engine(model, n_batch=n_batch)
    assert (
        list(
            BatchEngine(engine).generate(PROMPT, GenerationOptions(sampler=greedy(), max_tokens=5))
        )
        == want
    )
    assert np.allclose(engine.logits(PROMPT), new_engine(model).logits(PROMPT), atol=2e-2)


def test_sampler_is_told_prompt_and_output(model: Transformer) -> None:
    sampler = CountingSampler()
    ids = list(
        BatchEngine(new_engine(model)).generate(
            PROMPT, GenerationOptions(sampler=sampler, max_tokens=4)
        )
    )
    assert sampler.accepted == PROMPT + ids
    assert len(sampler.seen) == 4


@pytest.mark.parametrize("exact", [True, False])
def test_prefix_is_reused(model: Transformer, exact: bool) -> None:
    """The second turn of a conversation evaluates what is new, and draws what it would alone."""
    engine = new_engine(model, exact=exact)
    first = list(
        BatchEngine(engine).generate(PROMPT, GenerationOptions(sampler=greedy(), max_tokens=6))
    )
    longer = [*PROMPT, *first, 5, 6, 7]
    generation = BatchEngine(engine).generate(
        longer, GenerationOptions(sampler=greedy(), max_tokens=6)
    )
    again = list(generation)
    # the last token drawn was never evaluated, so it is not in the cache
    assert generation.stats.n_reused == len(PROMPT) + (0 if exact else 5)
    assert generation.stats.n_prompt == len(longer)
    assert again == list(
        BatchEngine(new_engine(model)).generate(
            longer, GenerationOptions(sampler=greedy(), max_tokens=6)
        )
    )


def test_prefix_that_differs_is_dropped(model: Transformer) -> None:
    engine = new_engine(model)
    list(BatchEngine(engine).generate(PROMPT, GenerationOptions(sampler=greedy(), max_tokens=6)))
    other = [*PROMPT[:25], 1, 2, 3]
    generation = BatchEngine(engine).generate(
        other, GenerationOptions(sampler=greedy(), max_tokens=6)
    )
    ids = list(generation)
    assert generation.stats.n_reused == 25
    assert ids == list(
        BatchEngine(new_engine(model)).generate(
            other, GenerationOptions(sampler=greedy(), max_tokens=6)
        )
    )


def test_same_prompt_evaluates_one_token(model: Transformer) -> None:
    engine = new_engine(model)
    want = list(
        BatchEngine(engine).generate(PROMPT, GenerationOptions(sampler=greedy(), max_tokens=3))
    )
    generation = BatchEngine(engine).generate(
        PROMPT, GenerationOptions(sampler=greedy(), max_tokens=3)
    )
    assert list(generation) == want
    assert generation.stats.n_reused == len(PROMPT) - 1


def test_stop_ids_end_it(model: Transformer) -> None:
    ids = list(
        BatchEngine(new_engine(model)).generate(
            PROMPT, GenerationOptions(sampler=greedy(), max_tokens=12)
        )
    )
    stop = ids[-1]
    generation = BatchEngine(new_engine(model)).generate(
        PROMPT, GenerationOptions(sampler=greedy(), max_tokens=12, stop_ids=frozenset([stop]))
    )
    assert list(generation) == ids[: ids.index(stop)]
    assert generation.finish_reason == "stop"


def test_context_ends(model: Transformer) -> None:
    engine = new_engine(model, n_ctx=45)
    generation = BatchEngine(engine).generate(PROMPT, GenerationOptions(sampler=greedy()))
    assert len(list(generation)) == 5
    assert generation.finish_reason == "length"
    assert generation.context_full
    limited = BatchEngine(engine).generate(
        PROMPT, GenerationOptions(sampler=greedy(), max_tokens=5)
    )
    assert len(list(limited)) == 5
    assert not limited.context_full
    full = BatchEngine(engine).generate(
        (PROMPT * 2)[:45], GenerationOptions(sampler=greedy(), max_tokens=5)
    )
    assert list(full) == []
    assert full.finish_reason == "length"
    assert full.context_full


def test_prompt_longer_than_the_context(model: Transformer) -> None:
    """It is refused before anything is computed or forgotten."""
    engine = new_engine(model, n_ctx=45)
    list(BatchEngine(engine).generate(PROMPT, GenerationOptions(sampler=greedy(), max_tokens=2)))
    cached = list(engine.cached_ids)
    with pytest.raises(ContextOverflowError, match="46 tokens, but the context holds 45"):
        BatchEngine(engine).generate((PROMPT * 2)[:46], GenerationOptions(sampler=greedy()))
    assert engine.cached_ids == cached


@pytest.mark.parametrize("ids", [[], [96], [-1]])
def test_ids_that_are_none(model: Transformer, ids: list[int]) -> None:
    with pytest.raises(LocalKVError, match=r"no tokens|not in the vocabulary of 96"):
        BatchEngine(new_engine(model)).generate(ids, GenerationOptions(sampler=greedy()))


def test_cancel_between_tokens(model: Transformer) -> None:
    engine, cancel = new_engine(model, exact=False), Event()
    generation = BatchEngine(engine).generate(
        PROMPT, GenerationOptions(sampler=greedy(), cancel=cancel)
    )
    ids = [next(generation) for _ in range(3)]
    cancel.set()
    assert list(generation) == []
    assert generation.finish_reason == "cancelled"
    # what was evaluated is still there, and still right
    generation = BatchEngine(engine).generate(
        [*PROMPT, *ids], GenerationOptions(sampler=greedy(), max_tokens=4)
    )
    want = BatchEngine(new_engine(model)).generate(
        [*PROMPT, *ids], GenerationOptions(sampler=greedy(), max_tokens=4)
    )
    assert list(generation) == list(want)
    assert generation.stats.n_reused == len(PROMPT) + 2


def test_cancel_between_chunks(model: Transformer) -> None:
    class AfterTwo(Event):
        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            return self.looks > 2

    engine = new_engine(model, n_batch=10)
    generation = BatchEngine(engine).generate(
        PROMPT, GenerationOptions(sampler=greedy(), cancel=AfterTwo())
    )
    assert list(generation) == []
    assert generation.finish_reason == "cancelled"
    assert engine.cached_ids == PROMPT[:20]


def test_seed_is_reproducible(model: Transformer) -> None:
    def draw(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed, temperature=1.5), n_vocab=96)
        return list(
            BatchEngine(new_engine(model)).generate(
                PROMPT, GenerationOptions(sampler=sampler, max_tokens=20)
            )
        )

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_cache_that_does_not_fit(model: Transformer) -> None:
    with pytest.raises(LocalKVError, match=r"KV cache of [\d.]+ GiB for .* does not fit"):
        new_engine(model, n_ctx=1 << 44)
    with pytest.raises(LocalKVError, match=rf"GiB for 3 times {1 << 44} tokens does not fit"):
        Engine(model, CacheConfig(n_ctx=1 << 44, n_sequences=3))


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_recorded_steps_give_the_same_tokens(reference: Transformer, penalty: float) -> None:
    """Drawn on the device (no penalty) and on the host."""
    texts = []
    for engine in (new_engine(reference), recording_engine(reference)):
        engine.warm_up()
        ids: list[int] = []
        for prompt in (PROMPT, [*PROMPT, 1, 2, 3], PROMPT[:30]):
            sampler = greedy(repeat_penalty=penalty)
            generation = BatchEngine(engine).generate(
                prompt, GenerationOptions(sampler=sampler, max_tokens=10)
            )
            ids += generation
            assert generation.finish_reason == "length"
            assert generation.stats.n_generated == 10
            # all but the last token drawn are cached, and what they are is known
            assert engine.sequence.length == len(engine.cached_ids) == len(prompt) + 9
            assert engine.cached_ids == prompt + ids[-10:-1]
        texts.append(ids)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_recorded_steps_stop_where_they_should(reference: Transformer) -> None:
    engine = recording_engine(reference)
    ids = list(
        BatchEngine(engine).generate(PROMPT, GenerationOptions(sampler=greedy(), max_tokens=8))
    )
    stop = BatchEngine(engine).generate(
        PROMPT, GenerationOptions(sampler=greedy(), stop_ids=frozenset(ids[5:6]))
    )
    got = list(stop)
    assert got == ids[: ids.index(ids[5])]
    assert stop.finish_reason == "stop"
    cancel = Event()
    running = BatchEngine(engine).generate(
        PROMPT, GenerationOptions(sampler=greedy(), cancel=cancel)
    )
    got = [next(running) for _ in range(3)]
    cancel.set()
    assert (*got, *running) == tuple(ids[:3])
    assert running.finish_reason == "cancelled"
    assert (
        list(
            BatchEngine(engine).generate(
                PROMPT + ids[:2], GenerationOptions(sampler=greedy(), max_tokens=6)
            )
        )
        == ids[2:8]
    )
    full = BatchEngine(engine).generate(PROMPT, GenerationOptions(sampler=greedy()))
    assert len(list(full)) == 300 - len(PROMPT)
    assert full.context_full


def test_logprobs_of_recorded_steps(reference: Transformer) -> None:
    """The host sees each token's logits, and draws from them."""
    engine = recording_engine(reference)
    ids = list(
        BatchEngine(engine).generate(PROMPT, GenerationOptions(sampler=greedy(), max_tokens=8))
    )
    asked = BatchEngine(engine).generate(
        PROMPT, GenerationOptions(sampler=greedy(), max_tokens=8, logprobs=1)
    )
    assert list(asked) == ids
    assert [one.token for one in asked.logprobs] == ids
    assert [one.top for one in asked.logprobs] == [((o.token, o.logprob),) for o in asked.logprobs]


def test_a_seed_gives_the_same_tokens_on_the_device(reference: Transformer) -> None:
    engine = recording_engine(reference)

    def text(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed, temperature=2.0), n_vocab=96)
        return list(
            BatchEngine(engine).generate(PROMPT, GenerationOptions(sampler=sampler, max_tokens=12))
        )

    first = text(1)
    assert text(2) != first
    assert text(1) == first


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_recorded_steps_that_others_overtake(reference: Transformer, penalty: float) -> None:
    """Drawn on the device, which is a token ahead, and on the host: by turns as one by one."""

    def begin(engine: Engine, seed: int) -> Generation:
        params = SamplingParams(seed=seed, temperature=2.0, repeat_penalty=penalty)
        sampler = Sampler(params, n_vocab=96)
        return BatchEngine(engine).generate(
            PROMPT[seed:], GenerationOptions(sampler=sampler, max_tokens=10)
        )

    engine = recording_engine(reference)
    wanted = []
    for seed in range(3):
        engine.reset()
        wanted.append(list(begin(engine, seed)))
    logits = engine.logits(PROMPT[:20])
    generations = [begin(engine, seed) for seed in range(3)]
    got: list[list[int]] = [[], [], []]
    for i, number in enumerate([0, 0, 0, 1, 0, 2, 2, 1, 0, 0, 2, 1, 1, 0, 2]):
        got[number].append(next(generations[number]))
        if i % 6 == 5:
            assert np.array_equal(engine.logits(PROMPT[:20]), logits)
    for ids, generation in zip(got, generations, strict=True):
        ids += generation
    assert got == wanted
    assert len({*map(tuple, wanted)}) == 3


class Forced:
    """Wants some tokens at some positions of what is generated."""

    def __init__(self, wanted: dict[int, int]) -> None:
        self.wanted = wanted
        self.accepted: list[int] = []

    def forced(self) -> int | None:
        return self.wanted.get(len(self.accepted))

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("wanted", [{0: 5}, {3: 5, 4: 6}, {0: 1, 1: 2, 9: 3}])
@pytest.mark.parametrize("records", [False, True])
def test_forced_tokens_take_the_place_of_drawn_ones(
    reference: Transformer, records: bool, wanted: dict[int, int]
) -> None:
    """What follows is drawn after them, also where the next token is on its way already."""
    engine = recording_engine(reference) if records else new_engine(reference)
    forcing = Forced(wanted)
    generation = BatchEngine(engine).generate(
        PROMPT, GenerationOptions(sampler=greedy(), max_tokens=10, forcing=forcing)
    )
    ids = list(generation)
    assert ids == forcing.accepted
    assert len(ids) == 10
    assert generation.finish_reason == "length"
    for place, token in enumerate(ids):
        if place in wanted:
            assert token == wanted[place]
        else:
            best = new_engine(reference).logits(PROMPT + ids[:place])[-1].argmax()
            assert token == int(best)
    assert engine.cached_ids[: len(PROMPT) + 9] == (PROMPT + ids)[: len(engine.cached_ids)]
