"""Guesses in steps of many requests: the same texts, by bytes, whoever guesses what."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from localkv.config import CacheConfig
from localkv.engine import batch_engine as engine_module
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.engine.recorded import DecodeLoop
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.speculator import Pace, Prices, Speculator
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.held_pages import check_pages
from support.random_model import variant

SPECULATION = Speculation("ngram")
CACHE = CacheConfig("q8_0", "q4_0", n_ctx=600, n_sequences=3)
CACHES = {
    "f16": replace(CACHE, type_k="f16", type_v="f16"),
    "packed": CACHE,
    "tail": replace(CACHE, kv_tail=40, kv_sink=3),
    "groups": replace(CACHE, type_k="kv2_1c", type_v="kv2_1"),
    "states": replace(CACHE, ctx_checkpoints=3, checkpoint_min_step=8),
    "few pages": replace(CACHE, n_tokens=4 * 256),
}
Load = Callable[[str], Transformer]


def sampler(seed: int, temperature: float = 1.0) -> Sampler:
    params = SamplingParams(seed=seed, temperature=temperature, repeat_penalty=1.1)
    return Sampler(params, n_vocab=96, n_ctx=600)


class Guesser(Speculator):
    """Guesses the true text, up to errors, as much as there is room for."""

    def __init__(self, text: Sequence[int], errors: float) -> None:
        super().__init__(SPECULATION)
        self._text, self._errors, self._n = [*text, *[0] * 20], errors, 0
        self._random = random.Random(1)

    def begin(self, prompt: Sequence[int]) -> None:
        assert self._n == 0

    def accept(self, token: int) -> None:
        assert token == self._text[self._n]
        self._n += 1

    def draft(self, most: int, *, missing: int = 0, others: int = 0) -> list[int]:
        n = min(most, self._random.randrange(7))
        guesses = self._text[self._n : self._n + n]
        return [t if self._random.random() >= self._errors else (t + 1) % 96 for t in guesses]


def guess(monkeypatch: pytest.MonkeyPatch, guessers: Sequence[Speculator | None]) -> None:
    """The speculators of the next requests."""
    left = iter(guessers)

    def next_guesser(*_: object, reads_late: bool) -> object:
        return next(left) if reads_late else None  # nobody guesses for an engine without a batch

    monkeypatch.setattr(engine_module, "new_speculator", next_guesser)


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(96) for _ in range(n)]


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("llama", "packed"),
        *(
            pytest.param(name, cache, marks=pytest.mark.slow)
            for name, cache in [
                ("llama", "f16"),
                ("llama", "tail"),
                ("llama", "groups"),
                ("llama", "few pages"),
                ("gemma3", "packed"),
                ("qwen35", "states"),
                ("plm", "packed"),
            ]
        ),
    ],
)
def test_texts_are_those_without_guesses(
    load: Load, monkeypatch: pytest.MonkeyPatch, name: str, cache: str
) -> None:
    """Some guess and some don't, some are wrong, one comes late; the rows are right afterwards."""
    model, config = load(name), CACHES[cache]
    prompts = [prompt(seed, n) for seed, n in enumerate((240, 3, 60, 100))]
    alone = Engine(model, replace(config, n_sequences=1), n_batch=64)
    texts = [
        list(
            BatchEngine(alone).generate(
                ids, GenerationOptions(sampler=sampler(seed), max_tokens=90)
            )
        )
        for seed, ids in enumerate(prompts)
    ]
    engine = Engine(model, config, n_batch=64)
    batch = BatchEngine(engine)
    guess(monkeypatch, [Guesser(texts[0], 0.0), Guesser(texts[1], 0.4), None, Guesser(texts[3], 1)])
    generations = []
    for seed, ids in enumerate(prompts):
        generations.append(
            batch.generate(
                ids,
                GenerationOptions(sampler=sampler(seed), max_tokens=90, speculation=SPECULATION),
            )
        )
        if seed == 2:
            [next(generations[0]) for _ in range(20)]
    head = texts[0][:20]
    assert [head + list(generations[0]), *map(list, generations[1:])] == texts
    stats = [one.stats for one in generations]
    assert 0 < stats[0].n_accepted == stats[0].n_drafted
    assert 0 < stats[1].n_accepted < stats[1].n_drafted
    assert stats[2].n_drafted == stats[3].n_accepted == 0 < stats[3].n_verified
    assert batch.stats.n_accepted == stats[0].n_accepted + stats[1].n_accepted
    assert batch.stats.n_steps < 250
    check_pages(engine.cache)
    again = [*prompts[1], *texts[1][:50], 5]  # from rows that drafts were taken back of
    follow = list(
        BatchEngine(alone).generate(again, GenerationOptions(sampler=sampler(9), max_tokens=8))
    )
    guess(monkeypatch, [None])
    assert (
        list(batch.generate(again, GenerationOptions(sampler=sampler(9), max_tokens=8))) == follow
    )
    engine.reset()
    assert all(len(pool.free) == pool.n_pages for pool in engine.cache.pools)


def test_ends_among_guesses(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop token, the end of the context and a cancelled one, each in the middle of drafts."""
    model, config = load("llama"), replace(CACHE, n_ctx=60)
    ids = prompt(1, 40)
    text = list(
        BatchEngine(Engine(model, config, n_batch=16)).generate(
            ids, GenerationOptions(sampler=sampler(1))
        )
    )
    assert len(text) == 20
    engine = Engine(model, config, n_batch=16)
    batch = BatchEngine(engine)
    guess(monkeypatch, [Guesser(text, 0.0) for _ in range(3)])
    several = [
        batch.generate(
            ids,
            GenerationOptions(
                sampler=sampler(1),
                speculation=SPECULATION,
                logprobs=1,
                stop_ids=frozenset(text[9:10] if i == 1 else ()),
            ),
        )
        for i in range(3)
    ]
    first = [next(several[2]) for _ in range(7)]
    several[2].close()
    assert first == text[:7]
    assert list(several[0]) == text
    assert several[0].context_full
    assert len(several[0].logprobs) == 20
    assert list(several[1]) == text[: text.index(text[9])]
    assert several[1].finish_reason == "stop"
    assert batch.is_idle
    check_pages(engine.cache)


@pytest.mark.slow
def test_texts_that_repeat_themselves_draft_themselves(load: Load) -> None:
    """Greedy texts of random models go round in circles; three of them, and one beside a prompt."""
    model, config = load("llama"), replace(CACHE, n_ctx=400)
    alone = Engine(model, replace(config, n_sequences=1))
    batch = BatchEngine(Engine(model, config), step_ms=1000)
    prompts = [prompt(seed, 20) for seed in range(3)]
    generations = [
        batch.generate(
            ids, GenerationOptions(sampler=sampler(0, 0.0), max_tokens=150, speculation=SPECULATION)
        )
        for ids in prompts
    ]
    for generation in generations:  # a step of the model is too short for its price to be known
        assert generation.speculator is not None
        generation.speculator.pace.worth = lambda *_, **__: 7  # type: ignore[method-assign]
    for ids, generation in zip(prompts, generations, strict=True):
        text = list(
            BatchEngine(alone).generate(
                ids, GenerationOptions(sampler=sampler(0, 0.0), max_tokens=150)
            )
        )
        assert list(generation) == text


def test_guesses_of_one_are_paid_by_all() -> None:
    """What is worth it alone is not where eight wait for each row."""
    prices, pace = Prices(), Pace()
    for n_rows in (1, 2, 4, 8):
        for _ in range(2):
            prices.measured(n_rows, 0.01 * (1 + 0.1 * (n_rows - 1)))
    pace.prices = prices
    assert pace.worth(12, 7) >= 3
    assert pace.worth(12, 7, others=7) == 0
    for _ in range(60):
        pace.guessed(12, right=True)
    assert pace.worth(12, 7, others=7) > 0  # as it is right nearly always
    assert pace.worth(12, 7, others=15) == 0  # where a row costs more than a token's share
    for _ in range(20):
        pace.spent(4, 0.013, n_texts=8)  # a loss that it has to make good
    assert pace.worth(12, 7) == 0
    assert Pace(prices).worth(16, 7, others=1) > 0


def test_recorded_steps_are_left_for_guesses_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that records: those that guess nothing are decoded so."""
    path = variant("llama").write(tmp_path / "model.gguf")
    model = load_model(path, reference_backend())[0]
    prompts = [prompt(seed, 20) for seed in range(2)]
    config = replace(CACHE, n_ctx=300)
    alone, several = Engine(model, replace(config, n_sequences=1)), Engine(model, config)
    for engine in (alone, several):  # rows that nobody sees are multiplied with 0
        for layer in engine.cache.layers:
            for plane in (*layer.segments[0].k, *layer.segments[0].v):
                plane.fill_(0)
    texts = [
        list(
            BatchEngine(alone).generate(
                ids, GenerationOptions(sampler=sampler(2, 0.0), max_tokens=16)
            )
        )
        for ids in prompts
    ]
    batch = BatchEngine(several)
    loop = batch._model_steps.loop = DecodeLoop(model, batch.engine.cache)
    guess(monkeypatch, [Guesser(texts[0], 0.2), None])
    generations = [
        batch.generate(
            ids, GenerationOptions(sampler=sampler(2, 0.0), max_tokens=16, speculation=SPECULATION)
        )
        for ids in prompts
    ]
    assert [list(one) for one in generations] == texts
    assert generations[0].stats.n_accepted
    assert {key[0] for key in loop._buckets} == {1, 2}
