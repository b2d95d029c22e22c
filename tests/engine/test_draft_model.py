"""A model that drafts: texts are the same by bytes, and its own cache follows them."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.generation import Generation
from localkv.engine.requests.batch_engine import BatchEngine
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.draft_model import DraftModel, ModelSpeculator
from localkv.engine.speculation.draft_pace import DraftPace, confidence_of
from localkv.engine.token_text import Text
from localkv.errors import UsageError
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.metadata import Metadata
from localkv.loader.model_header import ModelHeader
from localkv.loader.shared_tokens import shared_tokens
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.hybrid_models import hybrid
from support.random_model import RandomModel

PROMPT = [(i * 37 + 11) % 96 for i in range(40)]
SPECULATION = Speculation("draft")
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.7, "top_k": 12, "repeat_penalty": 1.1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Transformer]:
    """A model, its copy with errors, which mostly guesses rightly, and another one."""
    folder = tmp_path_factory.mktemp("draft")
    like, other = RandomModel(), RandomModel(seed=1, n_layers=1)
    found = [load_model(like.write(folder / "model.gguf"), cpu_backend())[0]]
    for name, tensor in like.tensors.items():
        if name.endswith("ffn_down.weight"):
            tensor *= 1.02
    for number, made in enumerate((like, other)):
        path = made.write(folder / f"draft{number}.gguf")
        found.append(load_model(path, cpu_backend())[0])
    return found


def sampler(**params: object) -> Sampler:
    return Sampler(SamplingParams(seed=3, **params), n_vocab=96, n_ctx=300)


def drafting(
    model: Transformer, draft: Transformer, cache: CacheConfig, own: CacheConfig | None = None
) -> Engine:
    """An engine with a model that drafts, whatever that costs."""
    engine = Engine(model, cache)
    slot = Engine(draft, own or CacheConfig(n_ctx=300), exact=False).slot
    engine.draft = DraftModel(slot, 300, 96, engine.prices)
    engine.draft.pace.may_draft = lambda: True
    engine.draft.pace.worthy = len
    engine.draft.pace.goes_on = lambda confidence, number: number < 5
    return engine


def generated(engine: Engine, prompt: list[int], n: int, **params: object) -> Generation:
    return engine.generate(prompt, sampler=sampler(**params), max_tokens=n, speculation=SPECULATION)


PAIRS = [("q8_0", "q4_0"), ("f16", "f16"), ("q2_1c", "q2_1"), ("nuq3", "nuq4")]


@pytest.mark.parametrize(
    "pair",
    [
        PAIRS[0],
        *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS[1:]),
    ],
)
def test_the_text_is_the_one_without_a_draft(
    models: list[Transformer], pair: tuple[str, str]
) -> None:
    """With guesses that are mostly right, and with others; whatever the types of the two caches."""
    cache, n = CacheConfig(*pair, n_ctx=300), 30
    own = CacheConfig(*PAIRS[0], n_ctx=300)
    for params in (GREEDY, SAMPLED):
        plain = Engine(models[0], cache)
        text = list(plain.generate(PROMPT, sampler=sampler(**params), max_tokens=n))
        again = [*PROMPT, *text[: n // 2], 5]
        follow = list(plain.generate(again, sampler=sampler(**params), max_tokens=8))
        shares = []
        for draft in models[1:]:
            engine = drafting(models[0], draft, cache, own)
            generation = generated(engine, PROMPT, n, **params)
            assert list(generation) == text
            assert list(generated(engine, again, 8, **params)) == follow
            stats = generation.stats
            assert stats.n_drafted >= stats.n_verified > n / 16
            shares.append(stats.n_accepted / stats.n_drafted)
        assert shares[0] > 2 * shares[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"type_k": "q8_0"},
        pytest.param({"type_k": "q2_1c", "kv_sink": 3}, marks=pytest.mark.slow),
        pytest.param({"type_v": "q4_0", "kv_tail": 9}, marks=pytest.mark.slow),
        pytest.param({"arch": "qwen35"}, marks=pytest.mark.slow),
        pytest.param({"arch": "lfm2"}, marks=pytest.mark.slow),
    ],
)
def test_wrong_guesses_are_taken_back(
    models: list[Transformer], tmp_path: Path, changes: dict
) -> None:
    """A draft guesses as one that never guessed wrongly: its rows, tails and states follow."""
    changes, model = dict(changes), models[1]
    if arch := changes.pop("arch", None):
        model = load_model(hybrid(arch).write(tmp_path / "model.gguf"), cpu_backend())[0]
    cache = CacheConfig(n_ctx=300, **changes)

    def draft() -> DraftModel:
        engine = Engine(model, cache)  # exact, so that rows are the same bits
        return DraftModel(engine.slot, 300, 96, engine.prices)

    rng, kept, other = random.Random(1), draft(), Text(PROMPT[:9], 9)
    text = Text([rng.randrange(96) for _ in range(245)], 245)
    for number in range(12):
        found = guesses(kept, text, 6)
        assert found == guesses(draft(), Text(list(text.ids), text.n_prompt), 6)
        text.ids += found[: rng.randrange(5)]
        text.ids.append(rng.randrange(96))
        if number == 5:
            guesses(kept, other, 3)


def guesses(draft: DraftModel, text: Text, most: int) -> list[int]:
    found, _ = draft.draft(text, most, 0.0, lambda guess, number: True)
    return [guess.token for guess in found]


def test_where_a_draft_ends(models: list[Transformer]) -> None:
    """At tokens that are not probable enough, at those it does not know, and in its context."""
    engine = drafting(models[0], models[1], CacheConfig(n_ctx=300))
    draft = engine.draft
    assert draft is not None
    text = Text(list(PROMPT), len(PROMPT))
    assert draft.draft(text, 6, 1.0, lambda guess, number: True)[0] == []
    assert len(draft.draft(text, 6, 0.0, lambda guess, number: number < 3)[0]) == 3
    draft.n_ctx = len(PROMPT) + 2
    assert len(draft.draft(text, 6, 0.0, lambda guess, number: True)[0]) == 2
    assert len(list(generated(engine, PROMPT, 9, **GREEDY))) == 9
    draft.n_vocab = max(PROMPT)
    generation = generated(engine, PROMPT, 9, **GREEDY)
    assert len(list(generation)) == 9
    assert generation.stats.n_drafted == 0


def test_beside_others_nothing_is_drafted(models: list[Transformer]) -> None:
    """Texts that share steps are those without a draft, which goes on with the one that is left."""
    cache = CacheConfig(*PAIRS[0], n_ctx=300, n_sequences=2)
    prompts, lengths = [PROMPT, PROMPT[3:33]], [60, 12]
    texts = [
        list(Engine(models[0], cache).generate(ids, sampler=sampler(), max_tokens=n))
        for ids, n in zip(prompts, lengths, strict=True)
    ]
    engine = drafting(models[0], models[1], cache)
    batch = BatchEngine(engine)
    both = [
        batch.generate(ids, sampler=sampler(), max_tokens=n, speculation=SPECULATION)
        for ids, n in zip(prompts, lengths, strict=True)
    ]
    assert list(both[1]) == texts[1]
    assert both[0].stats.n_drafted == both[1].stats.n_drafted == 0
    assert list(both[0]) == texts[0]
    assert both[0].stats.n_accepted > 0
    assert batch.stats.n_accepted == both[0].stats.n_accepted


def test_a_draft_switches_itself_off() -> None:
    """What it costs when nothing is right is a small share of the time."""
    pace, total = DraftPace(), 0.0
    pace.prices.measured(1, 0.01)
    for _ in range(3):
        pace.measured(1, 0.01)
    rounds = 0
    for _ in range(1000):
        if pace.may_draft():
            rounds += 1
            pace.begin(1, 0.002)
            pace.goes_on(16, 1)
            pace.drafted(0.004)
            n = pace.worthy([16, 16])
            pace.guessed(16, right=False)
            pace.measured(1 + n, 0.01 + 0.001 * n)
            total += 0.014
        else:
            pace.measured(1, 0.01)
            total += 0.01
    assert 0 < rounds < 60
    assert total < 1000 * 0.01 * 1.03
    for _ in range(200):  # and on again, as guesses are right
        pace.guessed(16, right=True)
    pace.begin(1, 0.002)
    assert pace.goes_on(16, 1)
    assert pace.worthy([16, 16, 16]) == 3


def test_where_drafts_cost_too_much_it_rests(models: list[Transformer]) -> None:
    """It is not even asked for some tokens, which count as steps without drafts."""
    engine = drafting(models[0], models[1], CacheConfig(n_ctx=300))
    assert engine.draft is not None
    pace, allowed = engine.draft.pace, [False]
    pace.may_draft = lambda: allowed[0]
    text = list(Engine(models[0], CacheConfig(n_ctx=300)).generate(PROMPT, sampler=sampler()))
    speculator = ModelSpeculator(SPECULATION, engine.draft)
    speculator.begin(PROMPT)
    pace.prices.seconds[1] = 1.0
    assert not speculator.draft(8)
    for token in text[:16]:
        assert speculator.is_resting
        speculator.accept(token)
    assert not speculator.is_resting
    assert pace._spent == 15
    allowed[0] = True
    assert speculator.draft(8)
    allowed[0] = False
    generation = generated(engine, PROMPT, 40)
    assert list(generation) == text[:40]
    assert generation.stats.n_drafted == 0


def test_confidence() -> None:
    levels = [confidence_of(p) for p in (0.0, 0.49, 0.5, 0.9, 0.99, 0.9999, 1.0)]
    assert levels == sorted(levels)
    assert (levels[0], levels[-1]) == (1, 16)


def header(name: str, n: int, changes: dict[int, str] | None = None) -> ModelHeader:
    tokens = [(changes or {}).get(i, f"t{i}") for i in range(n)]
    values = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    return cast("ModelHeader", SimpleNamespace(path=Path(name), metadata=Metadata(values)))


def test_only_models_with_the_same_tokens_draft() -> None:
    """Padding at the end may differ; what differs otherwise is said."""
    model, padded = header("model", 300), header("padded", 310)
    assert shared_tokens(model, padded) == shared_tokens(padded, model) == 300
    for other, said in (
        (header("long", 500), "it has 500 tokens, the model 300"),
        (header("other", 300, {7: "seven"}), "token 7 is 'seven' there, and 't7' here"),
    ):
        with pytest.raises(UsageError, match=said):
            shared_tokens(model, other)


def test_what_makes_no_sense_is_refused(models: list[Transformer]) -> None:
    engine = Engine(models[0], CacheConfig(n_ctx=64))
    with pytest.raises(UsageError, match="needs a model that drafts"):
        engine.generate(PROMPT, sampler=sampler(), speculation=SPECULATION)
    with pytest.raises(UsageError, match="draft_p_min"):
        Speculation("draft", draft_p_min=1.5)
