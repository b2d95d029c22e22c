"""Guessed tokens change nothing but the speed: the same text, by bytes, whatever is guessed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.config import CacheConfig
from localkv.engine import batch_engine as engine_module
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import Generation, GenerationOptions
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.speculator import (
    LONGEST_PAUSE,
    NgramDrafter,
    Pace,
    Prices,
    Speculator,
)
from localkv.errors import UsageError
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.quant_formats import KV_FORMATS
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.hybrid_models import hybrid
from support.random_model import RandomModel

PROMPT = [(i * 37 + 11) % 96 for i in range(40)]
SPECULATION = Speculation("ngram")
CORRECTING = (
    {"temperature": 1.5, "mirostat": 2, "mirostat_tau": 3.0},
    {"temperature": 1.5, "adaptive_target": 0.3},
)
SAMPLED = {"temperature": 1.5, "top_k": 12, "repeat_penalty": 1.1, "xtc_probability": 0.3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    path = RandomModel().write(tmp_path_factory.mktemp("speculation") / "model.gguf")
    return load_model(path, cpu_backend())[0]


class Guesser(Speculator):
    """Guesses the true text, up to errors: the text is that of an engine that guesses nothing."""

    def __init__(self, text: Sequence[int], errors: float, seed: int = 1) -> None:
        super().__init__(SPECULATION)
        self._text, self._errors, self._random = [*text, *[0] * 20], errors, random.Random(seed)
        self._n = -1

    def begin(self, prompt: Sequence[int]) -> None:
        self._n = 0

    def accept(self, token: int) -> None:
        assert token == self._text[self._n]
        self._n += 1

    def draft(self, most: int, *, missing: int = 0, others: int = 0) -> list[int]:
        n = min(most, self._random.randrange(7))
        guesses = self._text[self._n : self._n + n + 1][:n]
        return [t if self._random.random() >= self._errors else (t + 1) % 96 for t in guesses]


def sampler(seed: int = 3, **params: object) -> Sampler:
    return Sampler(SamplingParams(seed=seed, **params), n_vocab=96, n_ctx=300)


def guess(monkeypatch: pytest.MonkeyPatch, guesser: Speculator) -> None:
    monkeypatch.setattr(
        engine_module, "new_speculator", lambda config, *_, **__: guesser if config.is_on else None
    )


def check(
    make: object, monkeypatch: pytest.MonkeyPatch, n: int, prompt: list[int] = PROMPT
) -> Generation:
    """Texts with guesses are those without, sampled and greedy, and so are the next ones."""
    for params in ({"temperature": 0.0}, SAMPLED, *CORRECTING):
        plain = make()
        text = list(
            BatchEngine(plain).generate(
                prompt, GenerationOptions(sampler=sampler(**params), max_tokens=n)
            )
        )
        again = [*prompt, *text[: n // 2], 5]
        follow = list(
            BatchEngine(plain).generate(
                again, GenerationOptions(sampler=sampler(**params), max_tokens=8)
            )
        )
        for errors in (0.0, 0.3):
            engine = make()
            guess(monkeypatch, Guesser(text, errors))
            generation = BatchEngine(engine).generate(
                prompt,
                GenerationOptions(sampler=sampler(**params), max_tokens=n, speculation=SPECULATION),
            )
            assert list(generation) == text, (params, errors)
            assert generation.stats.n_verified > n / 16
            assert (generation.stats.n_accepted < generation.stats.n_drafted) == (errors > 0)
            assert len(engine.cached_ids) == engine.sequence.length
            assert (
                list(
                    BatchEngine(engine).generate(
                        again, GenerationOptions(sampler=sampler(**params), max_tokens=8)
                    )
                )
                == follow
            )
    return generation


PAIRS = [("f16", "f16"), ("q8_0", "q4_0"), ("kv2_1c", "kv2_1"), ("nuq3", "nuq4")]


@pytest.mark.parametrize(
    "pair",
    [
        *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS[:1] + PAIRS[2:]),
        PAIRS[1],
        *(
            pytest.param((name, name), marks=pytest.mark.slow)
            for name in KV_FORMATS
            if not KV_FORMATS[name].scales_by_head
        ),
    ],
)
def test_the_text_is_the_one_without_guesses(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]
) -> None:
    cache = CacheConfig(*pair, n_ctx=300)
    check(lambda: Engine(model, cache), monkeypatch, 40)


@pytest.mark.slow
def test_tails_and_pages_are_cut_back(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = (PROMPT * 7)[:244]  # 256 tokens are a page
    for changes in ({"kv_tail": 9}, {"kv_sink": 3, "kv_tail": 40}, {"type_k": "kv2_1c"}):
        cache = CacheConfig(**{"type_k": "q4_0", "type_v": "q4_0", "n_ctx": 300, **changes})
        check(lambda cache=cache: Engine(model, cache), monkeypatch, 40, prompt)


def test_guesses_send_no_page_down(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess whose row begins a page would have the tokens before it see smaller types."""
    page = Engine(model, CacheConfig(n_ctx=256)).cache
    budget = 3 * (page.n_bytes("k") + page.n_bytes("v")) // 2
    cache = CacheConfig(n_ctx=300, kv_budget=budget, kv_ladder=(("f16", "f16"), ("q4_0", "q4_0")))
    check(lambda: Engine(model, cache), monkeypatch, 40, (PROMPT * 7)[:235])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35", "lfm2", "kimi-linear"])
def test_states_are_cut_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    hybrid_model = load_model(hybrid(name).write(tmp_path / "model.gguf"), cpu_backend())[0]
    for most in (0, 3):
        cache = CacheConfig(n_ctx=300, ctx_checkpoints=most, checkpoint_min_step=8)
        check(lambda cache=cache: Engine(hybrid_model, cache, n_batch=32), monkeypatch, 40)


def test_the_end_of_the_context_and_of_a_batch(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = lambda: Engine(model, CacheConfig(n_ctx=60), n_batch=5)  # noqa: E731
    text = list(
        BatchEngine(make()).generate(PROMPT, GenerationOptions(sampler=sampler(temperature=0.0)))
    )
    guess(monkeypatch, Guesser(text, 0.1))
    generation = BatchEngine(make()).generate(
        PROMPT,
        GenerationOptions(sampler=sampler(temperature=0.0), speculation=SPECULATION, logprobs=2),
    )
    assert list(generation) == text
    assert generation.context_full
    assert len(generation.logprobs) == len(text) == 20
    stop = frozenset({text[9]})
    n = text.index(text[9])
    guess(monkeypatch, Guesser(text, 0.0))
    generation = BatchEngine(make()).generate(
        PROMPT,
        GenerationOptions(sampler=sampler(temperature=0.0), speculation=SPECULATION, stop_ids=stop),
    )
    assert list(generation) == text[:n]
    assert generation.finish_reason == "stop"


def test_texts_in_turn(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take the cache while guesses are verified."""
    engine = Engine(model, CacheConfig(n_ctx=300))
    prompts = [PROMPT, [7, *PROMPT[:20]]]
    texts = [
        list(
            BatchEngine(engine).generate(
                prompt, GenerationOptions(sampler=sampler(**SAMPLED), max_tokens=30)
            )
        )
        for prompt in prompts
    ]
    running = []
    for prompt, text in zip(prompts, texts, strict=True):
        guess(monkeypatch, Guesser(text, 0.2))
        running.append(
            BatchEngine(engine).generate(
                prompt,
                GenerationOptions(
                    sampler=sampler(**SAMPLED), max_tokens=30, speculation=SPECULATION
                ),
            )
        )
    found: list[list[int]] = [[], []]
    order = random.Random(5)
    while any(len(ids) < 30 for ids in found):
        which = order.randrange(2)
        if (token := next(running[which], None)) is not None:
            found[which].append(token)
    assert found == texts


def test_cancelling_between_verified_tokens(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cancel = Engine(model, CacheConfig(n_ctx=300)), Event()
    text = list(
        BatchEngine(engine).generate(
            PROMPT, GenerationOptions(sampler=sampler(temperature=0.0), max_tokens=30)
        )
    )
    guess(monkeypatch, Guesser(text, 0.0))
    generation = BatchEngine(engine).generate(
        PROMPT,
        GenerationOptions(sampler=sampler(temperature=0.0), cancel=cancel, speculation=SPECULATION),
    )
    first = [next(generation) for _ in range(5)]
    cancel.set()
    assert first + list(generation) == text[:5]
    assert generation.finish_reason == "cancelled"
    assert (
        list(
            BatchEngine(engine).generate(
                PROMPT, GenerationOptions(sampler=sampler(temperature=0.0), max_tokens=30)
            )
        )
        == text
    )


def test_the_text_drafts_itself(model: Transformer) -> None:
    """Greedy texts of random models go round in circles, which n-grams find."""
    engine = Engine(model, CacheConfig(n_ctx=300))
    text = list(
        BatchEngine(engine).generate(
            PROMPT, GenerationOptions(sampler=sampler(temperature=0.0), max_tokens=150)
        )
    )
    generation = BatchEngine(engine).generate(
        PROMPT,
        GenerationOptions(
            sampler=sampler(temperature=0.0), max_tokens=150, speculation=SPECULATION
        ),
    )
    assert list(generation) == text
    none = BatchEngine(engine).generate(
        PROMPT, GenerationOptions(sampler=sampler(), max_tokens=3, speculation=Speculation("none"))
    )
    assert len(list(none)) == 3
    assert none.stats.n_drafted == 0


# The drafter, and what is worth its rows.


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 20))
def test_n_grams_go_on_as_they_did_before(ids: list[int], most: int) -> None:
    drafter = NgramDrafter()
    for token in ids:
        drafter.accept(token)
    draft = drafter.draft(most)
    if not draft:
        assert not drafter.confidence
        for size in (2, 3, 6):
            last = ids[-size:]
            known = [ids[i : i + size] for i in range(len(ids) - size)]
            assert len(ids) <= size or last not in known
        return
    n = drafter.confidence
    assert len(draft) == most
    whole = ids + draft
    starts = [at for at in range(len(ids) - n) if ids[at : at + n] == ids[-n:]]
    assert n >= 2
    assert any(whole[at + n : at + n + most] == draft for at in starts)


def test_drafts_that_are_wrong_are_not_worth_it() -> None:
    pace = Pace()
    for _ in range(2):
        pace.measured(1, 0.01)
    assert pace.worth(0, 8) == 0
    assert pace.worth(16, 8) >= 3
    for _ in range(9):
        for confidence in range(1, 17):
            pace.guessed(confidence, right=False)
    assert not any(pace.worth(confidence, 8) for confidence in range(17))
    for _ in range(60):
        pace.guessed(3, right=True)
    assert pace.worth(3, 8) > 0
    pace.measured(4, 0.05)
    assert not pace.worth(3, 8)  # nothing was saved, and that was too much
    for _ in range(2):
        pace.saved()
    assert pace.worth(3, 8) > 0


def test_a_text_without_repeats_is_looked_at_seldom() -> None:
    """And at every token as soon as it repeats itself, of which nothing is missed meanwhile."""
    prices = Prices()
    for n, seconds in ((1, 0.010), (2, 0.011), (4, 0.012), (8, 0.014), (16, 0.02)):
        prices.measured(n, seconds)
        prices.measured(n, seconds)
    speculator = Speculator(SPECULATION, prices)
    speculator.begin(range(50))
    looks = []
    for token in range(50, 50 + 10 * LONGEST_PAUSE):
        speculator.accept(token)
        looks.append(not speculator.is_resting)
        assert not speculator.draft(15)
    assert sum(looks) <= 15
    drafted = []
    for token in range(55, 55 + 3 * LONGEST_PAUSE):
        speculator.accept(token)
        drafted.append(list(speculator.draft(3)))
    assert drafted[-1] == [token + 1, token + 2, token + 3]
    assert all(drafted[-LONGEST_PAUSE:])


def test_rows_that_cost_a_step_each_are_not_worth_it() -> None:
    pace = Pace()
    for n in (1, 1, 2, 2, 4, 4, 8, 8):
        pace.measured(n, 0.01 * n)
        for _ in range(n):
            pace.saved()
    assert not pace.worth(2, 8)
    for _ in range(50):
        pace.measured(4, 0.011)
        pace.saved()
    assert pace.worth(16, 8) == 3


@pytest.mark.parametrize(
    "values", [("words",), ("ngram", 0), ("ngram", 64), ("ngram", 4, 5), ("ngram", 4, 0)]
)
def test_what_makes_no_sense_is_refused(values: tuple) -> None:
    with pytest.raises(UsageError):
        Speculation(*values)
