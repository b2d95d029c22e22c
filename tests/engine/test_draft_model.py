"""A model that drafts: texts are the same by bytes, and its own cache follows them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from gguf import GGMLQuantizationType

from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import Generation, GenerationOptions
from localkv.engine.prefix import Text
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.draft_model import (
    DraftModel,
    DraftPace,
    Guess,
    ModelSpeculator,
    confidence_of,
)
from localkv.engine.speculation.speculator import Prices
from localkv.errors import UsageError
from localkv.kernels.backend import Guessed, Guessing
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.metadata import Metadata
from localkv.loader.model_header import ModelHeader, shared_tokens
from localkv.loader.weights import load_model
from localkv.memory.draft_file import DraftFile
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.hybrid_models import hybrid
from support.random_model import RandomModel

PROMPT = [(i * 37 + 11) % 96 for i in range(40)]
SPECULATION = Speculation("draft")
MODELS = Path(__file__).parents[2] / "models"
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


def as_many(most: int, p_min: float = 0.0, few: int = 99) -> Guessing:
    """`n` guesses, of which only `few` are likely enough."""
    least = [0.0 if number < few else 2.0 for number in range(1, most + 1)]
    return Guessing(most, 96, p_min, (0.5,), (1.0, 1.0), least)


def drafting(
    model: Transformer, draft: Transformer, cache: CacheConfig, own: CacheConfig | None = None
) -> Engine:
    """An engine with a model that drafts, whatever that costs."""
    engine = Engine(model, cache)
    slot = Engine(draft, own or CacheConfig(n_ctx=300), exact=False).slot
    engine.draft = DraftModel(slot, 300, 96, engine.prices)
    engine.draft.pace.may_draft = lambda *_: True
    engine.draft.pace.worthy = lambda found, *_: [len(guesses) for guesses in found]
    engine.draft.pace.guessing = lambda most, *_, **__: as_many(min(most, 5))
    return engine


def generated(engine: Engine, prompt: list[int], n: int, **params: object) -> Generation:
    return BatchEngine(engine).generate(
        prompt, GenerationOptions(sampler=sampler(**params), max_tokens=n, speculation=SPECULATION)
    )


PAIRS = [("q8_0", "q4_0"), ("f16", "f16"), ("kv2_1c", "kv2_1"), ("nuq3", "nuq4")]


@pytest.mark.parametrize(
    "pair", [PAIRS[0], *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS[1:])]
)
def test_the_text_is_the_one_without_a_draft(
    models: list[Transformer], pair: tuple[str, str]
) -> None:
    """With guesses that are mostly right, and with others; whatever the types of the two caches."""
    cache, n = CacheConfig(*pair, n_ctx=300), 30
    own = CacheConfig(*PAIRS[0], n_ctx=300)
    for params in (GREEDY, SAMPLED):
        plain = Engine(models[0], cache)
        text = list(
            BatchEngine(plain).generate(
                PROMPT, GenerationOptions(sampler=sampler(**params), max_tokens=n)
            )
        )
        again = [*PROMPT, *text[: n // 2], 5]
        follow = list(
            BatchEngine(plain).generate(
                again, GenerationOptions(sampler=sampler(**params), max_tokens=8)
            )
        )
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
        pytest.param({"type_k": "kv2_1c", "kv_sink": 3}, marks=pytest.mark.slow),
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
    (found,), _ = draft.draft([(text, as_many(most))])
    return [guess.token for guess in found]


@pytest.mark.parametrize(
    ("changes", "is_at_once"),
    [
        ({"type_k": "q8_0", "type_v": "q4_0", "kv_sink": 4, "kv_tail": 0}, True),
        ({"type_k": "q8_0", "kv_tail": 9}, False),
        pytest.param({}, True, marks=pytest.mark.slow),
    ],
)
def test_guesses_at_once_are_those_made_one_by_one(
    tmp_path: Path, changes: dict, is_at_once: bool
) -> None:
    """Also from page to page, with several tokens missing, and as far as they are likely."""
    path = RandomModel().write(tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    model = load_model(path, cpu_backend())[0]
    cache, made, n_at_once = CacheConfig(n_ctx=600, **changes), list[list[Guess]](), 0
    for is_slow in (True, False):
        draft = DraftModel(Engine(model, cache).slot, 600, 96, Prices())
        results = list[Guessed | None]()
        draft.slot.guess = noting(draft.slot.guess, results, is_slow=is_slow)
        rng, text = random.Random(2), Text([5] * 180, 180)
        for number in range(60):
            least = [rng.choice((0.0, 0.0, 0.6, 0.95)) for _ in range(12)]
            guessing = Guessing(12, 90, rng.choice((0.0, 0.05)), (0.1, 0.3), (0.9, 0.5, 1.0), least)
            (found,), _ = draft.draft([(text, guessing)])
            if is_slow:
                made.append(found)
            assert found == made[number][: len(found)]
            assert len(draft.slot.ids) == draft.slot.sequence.length
            text.ids += [guess.token for guess in made[number]][: rng.randrange(4)]
            text.ids += [rng.randrange(96) for _ in range(rng.randrange(1, 4))]
        n_at_once = sum(one is not None for one in results)
    assert n_at_once > 30 if is_at_once else n_at_once == 0


def noting(
    guess: Callable[[list[int], Guessing], Guessed | None],
    results: list[Guessed | None],
    *,
    is_slow: bool,
) -> Callable[[list[int], Guessing], Guessed | None]:
    """`CacheSlot.guess`, whose results are kept, or one that can't guess at once."""

    def guessed(ids: list[int], guessing: Guessing) -> Guessed | None:
        results.append(None if is_slow else guess(ids, guessing))
        return results[-1]

    return guessed


def test_where_a_draft_ends(models: list[Transformer]) -> None:
    """At tokens that are not probable enough, at those it does not know, and in its context."""
    engine = drafting(models[0], models[1], CacheConfig(n_ctx=300))
    draft = engine.draft
    assert draft is not None
    text = Text(list(PROMPT), len(PROMPT))
    assert draft.draft([(text, as_many(6, p_min=1.0))])[0] == [[]]
    assert len(draft.draft([(text, as_many(6, few=3))])[0][0]) == 3
    draft.n_ctx = len(PROMPT) + 2
    assert len(draft.draft([(text, as_many(6))])[0][0]) == 2
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
        list(
            BatchEngine(Engine(models[0], cache)).generate(
                ids, GenerationOptions(sampler=sampler(), max_tokens=n)
            )
        )
        for ids, n in zip(prompts, lengths, strict=True)
    ]
    engine = drafting(models[0], models[1], cache)
    batch = BatchEngine(engine)
    both = [
        batch.generate(
            ids, GenerationOptions(sampler=sampler(), max_tokens=n, speculation=SPECULATION)
        )
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
            pace.guessing(3, 1, 0.002, 96, 0.0)
            pace.drafted(0.004)
            (n,) = pace.worthy([[16, 16]])
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
    guessing = pace.guessing(3, 1, 0.002, 96, 0.0)
    assert guessing.goes_on(guessing.chance(1.0), 1)
    assert pace.worthy([[16, 16, 16]]) == [3]


def test_a_slow_first_step_makes_no_draft_look_quick() -> None:
    """What a step takes is the shortest of the first ones, and known after these."""
    prices = DraftPace().prices
    for seconds in (0.5, 0.03, 0.01):
        prices.measured(1, seconds)
        assert not prices.knows_step
    prices.measured(1, 0.011)
    assert prices.knows_step
    assert prices.one == 0.01
    for _ in range(30):
        prices.measured(1, 0.02)
    assert prices.one > 0.015


def test_what_others_take_of_the_machine_is_no_debt() -> None:
    """Nor does what was saved long ago pay for drafts that are wrong now."""
    pace = DraftPace()
    for n_rows in (1, 1, 1, 1, 4, 4):
        pace.measured(n_rows, 0.01 * (1 + n_rows / 10))
    for _ in range(400):
        pace.drafted(0.004)
        pace.measured(4, 0.014)
        for _ in range(3):
            pace.saved()
    pace.drafted(0.004)
    pace.measured(4, 3.0)
    assert pace.may_draft()
    rounds = 0
    while pace.may_draft():
        pace.drafted(0.004)
        pace.measured(4, 0.014)
        rounds += 1
    assert rounds < 20
    assert not pace.may_draft(0.001)
    pace.rested(pace.tokens_to_rest(0.001))
    assert pace.may_draft(0.001)
    assert not pace.may_draft(0.1)  # to read what it lacks would take too long
    assert pace.compares
    pace.measured(1, 0.02)
    one = pace.prices.one
    assert pace.compares  # that one found the caches of the processor as drafts left them
    pace.measured(1, 0.02)
    assert not pace.compares
    assert pace.prices.one > one


def test_where_drafts_cost_too_much_it_rests(models: list[Transformer]) -> None:
    """It is not even asked for some tokens, which count as steps without drafts."""
    engine = drafting(models[0], models[1], CacheConfig(n_ctx=300))
    assert engine.draft is not None
    pace, allowed = engine.draft.pace, [False]
    pace.may_draft = lambda *_: allowed[0]
    text = list(
        BatchEngine(Engine(models[0], CacheConfig(n_ctx=300))).generate(
            PROMPT, GenerationOptions(sampler=sampler())
        )
    )
    speculator = ModelSpeculator(SPECULATION, engine.draft)
    speculator.begin(PROMPT)
    pace.prices.one = 1.0
    assert not speculator.draft(8)
    for token in text[:16]:
        assert speculator.is_resting
        speculator.accept(token)
    assert not speculator.is_resting
    assert pace._lost == pytest.approx(-0.3)  # a share of the steps makes up for drafts
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
        BatchEngine(engine).generate(
            PROMPT, GenerationOptions(sampler=sampler(), speculation=SPECULATION)
        )
    with pytest.raises(UsageError, match="draft_p_min"):
        Speculation("draft", draft_p_min=1.5)
    model = open_gguf(MODELS / "tales-4M-Q8_0.gguf")
    for pair, said in (
        (("f16", "q9"), "the draft model: unknown V cache type 'q9'"),
        (("fp8_e4m3_head", "f16"), "the draft model: cache type fp8_e4m3_head needs scales"),
    ):
        with pytest.raises(UsageError, match=said):
            DraftFile.of(MODELS / "tales-draft-Q8_0.gguf", model, *pair)
