"""A block of the model's own file guesses: texts are the same by bytes, logits are llama.cpp's."""

from __future__ import annotations

import base64
import gc
import json
from dataclasses import replace
from pathlib import Path
from weakref import ref

import numpy as np
import pytest

from localkv import LLM
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import Generation, GenerationOptions
from localkv.engine.prefix import Text
from localkv.engine.speculation.config import Speculation
from localkv.engine.speculation.prediction_head import HeadText, PredictionHead
from localkv.errors import ModelClosedError, ModelFileError, UsageError
from localkv.kernels.backend import Guessing
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.f32_copy import f32_copy
from support.forward import nmse
from support.head_models import HEAD_MODELS
from support.held_pages import check_pages
from support.hybrid_models import IDS, LAYERS, N_VOCAB, SHOWN, hybrid

PROMPT = IDS[:40]
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.7, "top_k": 12, "repeat_penalty": 1.1}
SPECULATION = Speculation("mtp", draft_max=4)
MODELS = {name: HEAD_MODELS[name] for name in ("glm4moe", "qwen35")}
LLAMA_CPP = json.loads((Path(__file__).parents[1] / "data" / "llama_cpp_heads.json").read_text())
"""Logits of llama.cpp b11434, by F32 files. A context of type `LLAMA_CONTEXT_TYPE_MTP` with K and
V of F32 reads `IDS[1:]` with the hidden states of the tokens before. Then it guesses two tokens,
each from its own hidden state. Float32 [positions shown and two guesses, n_vocab]."""


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[name](tmp_path_factory.mktemp("head") / f"{name}.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Transformer:
    return load_model(path, cpu_backend(), predicts=True)[0]


def sampler(**params: object) -> Sampler:
    return Sampler(SamplingParams(seed=3, **params), n_vocab=N_VOCAB, n_ctx=300)


def with_head(model: Transformer, cache: CacheConfig, own: CacheConfig | None = None) -> Engine:
    """An engine whose head guesses, whatever that costs."""
    engine = Engine(model, cache, n_between=SPECULATION.n_between)
    engine.add_head(own or CacheConfig())
    head = head_of(engine)
    engine.prices.one = 1e-3
    head.pace.may_draft = lambda *_: True
    head.pace.worthy = lambda found, *_: [len(guesses) for guesses in found]
    head.pace.guessing = lambda most, *_, **__: as_many(most)
    return engine


def head_of(engine: Engine) -> PredictionHead:
    assert engine.head is not None
    return engine.head


def as_many(most: int) -> Guessing:
    return Guessing(most, N_VOCAB, 0.0, (), (1.0,), (0.0,) * most)


def generated(
    engine: Engine, prompt: list[int], n: int, spec: Speculation = SPECULATION, **params: object
) -> Generation:
    options = GenerationOptions(sampler=sampler(**params), max_tokens=n, speculation=spec)
    return BatchEngine(engine).generate(prompt, options)


def knowing(patch: pytest.MonkeyPatch, texts: list[list[int]], wrong: int) -> None:
    """Have heads guess the tokens of texts, all but each `wrong`th, wherever they are in them."""
    likeliest, numbers = HeadText.likeliest, iter(range(1 << 20))

    def next_known(self: HeadText, logits: np.ndarray) -> tuple[int, float]:
        token, probability = likeliest(self, logits)
        n, ids, at = self.text.n_prompt, self.text.ids, self.n_rows + 1
        text = next((one for one in texts if one[:n] == ids[:n]), ids)
        return (text[at] if next(numbers) % wrong and at < len(text) else token), probability

    patch.setattr(HeadText, "likeliest", next_known)


CACHES = [
    CacheConfig("q8_0", "q4_0", n_ctx=300),
    CacheConfig(n_ctx=300),
    CacheConfig("q4_0", "q4_0", n_ctx=300, kv_tail=9, kv_sink=3),
    CacheConfig("kv2_1c", "kv2_1", n_ctx=300),
]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "drawn"])
@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.types_text)
def test_the_text_is_the_one_without_guesses(
    model: Transformer, cache: CacheConfig, params: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With guesses of a random head, and with guesses that are mostly right."""
    n, plain = 40, Engine(model, cache)
    text = list(generated(plain, PROMPT, n, Speculation(), **params))
    again = [*PROMPT, *text[: n // 2], 5]
    follow = list(generated(plain, again, 9, Speculation(), **params))
    for share in (0, 7):
        engine = with_head(model, cache, CacheConfig("q8_0", "q5_0"))
        if share:
            knowing(monkeypatch, [[*PROMPT, *text]], share)
        generation = generated(engine, PROMPT, n, **params)
        assert list(generation) == text
        stats = generation.stats
        assert stats.n_drafted >= stats.n_verified > n / 16
        if share:
            assert stats.n_accepted > stats.n_generated / 2
        assert list(generated(engine, again, 9, **params)) == follow


@pytest.mark.parametrize("name", HEAD_MODELS)
def test_heads_of_all_architectures_guess(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head guesses as in the test of logits, and the text is the one without guesses."""
    loaded = load_model(HEAD_MODELS[name](tmp_path / "m.gguf"), cpu_backend(), predicts=True)[0]
    cache = CacheConfig("q8_0", "q8_0", n_ctx=300)
    text = list(generated(Engine(loaded, cache), PROMPT, 24, Speculation()))
    engine = with_head(loaded, cache)
    knowing(monkeypatch, [[*PROMPT, *text]], 7)
    generation = generated(engine, PROMPT, 24)
    assert list(generation) == text
    assert generation.stats.n_drafted > generation.stats.n_accepted > 8


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_the_logits_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    whole = f32_copy(HEAD_MODELS[name](tmp_path / "model.gguf"), tmp_path / "f32.gguf")
    model = load_model(whole, cpu_backend(), predicts=True)[0]
    engine = with_head(model, CacheConfig("f32", "f32", n_ctx=300), CacheConfig("f32", "f32"))
    head = head_of(engine)
    hidden, sequence, rows = states(engine, IDS), head.cache.new_sequence(), []

    def run(token: int, of: np.ndarray) -> tuple[np.ndarray, int]:
        following, logits = head.next_of(head.run([(sequence, [token])], of, wants=True))
        rows.append(logits[0])
        return following, int(logits[0].argmax())

    for at in range(1, len(IDS)):
        following, guess = run(IDS[at], hidden[at - 1 : at])
    for _ in range(2):
        following, guess = run(guess, following)
    got = np.array(rows)[[*(at - 1 for at in SHOWN), -2, -1]]
    want = np.frombuffer(base64.b64decode(LLAMA_CPP[name]), np.float32).reshape(got.shape)
    assert nmse(got, want) <= (2e-7 if "latent" in LAYERS.get(name, ()) else 1e-9)


def states(engine: Engine, ids: list[int]) -> np.ndarray:
    """Normed hidden states of a prompt's tokens."""
    text, found = Text(list(ids), len(ids)), list[np.ndarray]()
    text.saw = lambda at, hidden: found.append(np.array(hidden))
    engine.slot.take(text)
    engine.slot.turn(lambda: engine.slot.logits(text))
    return np.concatenate(found)


def test_wrong_guesses_are_taken_back(model: Transformer) -> None:
    """A head guesses as one that never guessed wrongly, whether it reads late or at once."""
    engine = with_head(model, CacheConfig(n_ctx=300))
    head, hidden = head_of(engine), states(engine, IDS)
    text = Text(IDS[:31], 30)
    rows = HeadText(head, text)
    rows.saw(0, hidden[:30])
    for at in range(31, len(IDS)):
        (found,) = head.guesses([(rows, as_many(4))])
        assert len(found) == 4
        other = HeadText(head, Text(list(text.ids), 30))
        other.saw(0, hidden[: len(text.ids) - 1])
        (wanted,) = head.guesses([(other, as_many(4))])
        assert [one.token for one in wanted] == [one.token for one in found]
        other.give_back()
        text.ids.append(IDS[at])
        rows.saw(at - 1, np.concatenate([hidden[at - 1 : at], 0 * hidden[:3]]))


def test_texts_that_take_turns(model: Transformer) -> None:
    """Each of two texts goes on with its own rows; one that is over leaves them to the next."""
    cache = CacheConfig(n_ctx=300)
    plain = Engine(model, cache)
    prompts = (PROMPT, IDS[20:50])
    want = [list(generated(plain, prompt, 20, Speculation(), **GREEDY)) for prompt in prompts]
    engine = with_head(model, cache)
    both = [generated(engine, prompt, 20, **GREEDY) for prompt in prompts]
    got: list[list[int]] = [[], []]
    for _ in range(20):
        for out, generation in zip(got, both, strict=True):
            out.append(next(generation))
    assert got == want
    head = head_of(engine)
    list(generated(engine, [*PROMPT, *want[0], 3], 4, **GREEDY))
    assert head.prefixes.texts
    assert head.cache.new_sequence()


def test_a_reset_forgets_rows(model: Transformer) -> None:
    engine = with_head(model, CacheConfig(n_ctx=300))
    head = head_of(engine)
    text = list(generated(engine, PROMPT, 9, **GREEDY))
    running = generated(engine, IDS[20:50], 9, **GREEDY)
    next(running)
    assert head.prefixes.texts
    engine.reset()
    assert not head.prefixes.texts
    assert all(len(pool.free) == pool.n_pages for pool in head.cache.pools)
    list(running)
    assert list(generated(engine, PROMPT, 9, **GREEDY)) == text


def test_a_closed_engine_lets_go_of_the_model(path: Path) -> None:
    engine = with_head(load_model(path, cpu_backend(), predicts=True)[0], CacheConfig(n_ctx=300))
    model, cache = ref(engine.model), ref(head_of(engine).cache)
    batch = BatchEngine(engine)
    options = GenerationOptions(sampler=sampler(**GREEDY), speculation=SPECULATION)
    running = batch.generate(PROMPT, options)
    next(running)
    batch.close()
    gc.collect()
    assert model() is None
    assert cache() is None
    with pytest.raises(ModelClosedError):
        list(running)


PROMPTS = (PROMPT, IDS[20:50], IDS[5:9], IDS[30:60])


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.types_text)
@pytest.mark.parametrize("wrong", [1, 5])
def test_several_requests_at_once(
    model: Transformer, cache: CacheConfig, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text is the one that it is alone; all of them are guessed, in fewer steps than tokens if
    guesses are right."""
    n, plain = 24, Engine(model, cache)
    want = [list(generated(plain, one, n, Speculation(), **SAMPLED)) for one in PROMPTS]
    engine = with_head(model, replace(cache, n_sequences=3))
    knowing(monkeypatch, [[*a, *b] for a, b in zip(PROMPTS, want, strict=True)], wrong)
    batch = BatchEngine(engine, step_ms=1e6)
    every = [
        batch.generate(
            one,
            GenerationOptions(sampler=sampler(**SAMPLED), max_tokens=n, speculation=SPECULATION),
        )
        for one in PROMPTS
    ]
    while not all(one.has_ended for one in every):
        batch.step()
    assert [list(one) for one in every] == want
    assert all(one.stats.n_drafted for one in every)
    if wrong > 1:
        assert batch.stats.n_accepted > 4 * n / 3
        assert batch.stats.n_steps < 4 * n / 3
    check_pages(engine.cache)
    check_pages(head_of(engine).cache)


def test_guesses_for_several_are_the_ones_for_each(model: Transformer) -> None:
    """Two texts come to the end of the context, one wants a single guess."""
    hidden = states(Engine(model, CacheConfig(n_ctx=300)), IDS)
    head = head_of(with_head(model, CacheConfig(n_ctx=32, n_sequences=6)))

    def rows_of(n: int) -> HeadText:
        rows = HeadText(head, Text(IDS[: n + 1], n))
        rows.saw(0, hidden[:n])
        return rows

    lengths, mosts = (20, 9, 30, 31, 25), (4, 4, 4, 4, 1)
    alone = []
    for n, most in zip(lengths, mosts, strict=True):
        rows = rows_of(n)
        alone += head.guesses([(rows, as_many(most))])
        rows.give_back()
    assert [len(one) for one in alone] == [4, 4, 3, 2, 1]
    several = [rows_of(n) for n in lengths]
    assert head.guesses([*zip(several, map(as_many, mosts), strict=True)]) == alone


def test_work_that_breaks_off_leaves_no_rows(model: Transformer) -> None:
    engine = with_head(model, CacheConfig(n_ctx=300))
    text = list(generated(engine, PROMPT, 12, **GREEDY))
    head, behind = head_of(engine), Transformer.behind
    other, rest = generated(engine, IDS[10:40], 12, **GREEDY), list[int]()
    rest.append(next(other))
    broken = generated(engine, IDS[20:50], 12, **GREEDY)
    next(broken)

    def interrupted(*_: object) -> np.ndarray:
        raise KeyboardInterrupt

    head.block.behind = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(broken)
    head.block.behind = behind.__get__(head.block)
    rest += other
    plain = Engine(model, CacheConfig(n_ctx=300))
    assert rest == list(generated(plain, IDS[10:40], 12, Speculation(), **GREEDY))
    assert other.stats.n_drafted
    assert list(generated(engine, PROMPT, 12, **GREEDY)) == text


def test_a_model_with_a_head_guesses_unless_it_is_told_not_to(path: Path) -> None:
    with LLM(path, n_ctx=128, progress=False) as llm:
        assert llm.speculation.drafter == "mtp"
        assert not llm.warnings
        text = list(generated(llm.engine, PROMPT, 30, llm.speculation, **GREEDY))
        assert list(generated(llm.engine, PROMPT, 30, Speculation(), **GREEDY)) == text
        assert llm.memory.draft is not None
        assert llm.memory.draft.weights == 0
        assert llm.memory.draft.cache_k > 0
        weights = llm.memory.weights
    with LLM(path, n_ctx=128, progress=False, n_parallel=2) as llm:
        assert llm.speculation.drafter == "mtp"
        assert head_of(llm.engine).cache.n_sequences == 2
    for arguments in ({"spec": "none"}, {"spec": "ngram"}):
        with LLM(path, n_ctx=128, progress=False, **arguments) as llm:
            assert llm.speculation.drafter != "mtp"
            assert llm.engine.head is None
            assert llm.memory.draft is None
            assert llm.memory.weights < weights
            assert not llm.warnings
            with pytest.raises(UsageError, match="none was loaded"):
                generated(llm.engine, PROMPT, 2)


def test_types_of_the_heads_cache(path: Path) -> None:
    types = {"cache_type_k_draft": "q8_0", "cache_type_v_draft": "q4_0"}
    with LLM(path, n_ctx=128, progress=False, **types) as llm:
        layout = head_of(llm.engine).cache.layouts[0]
        assert [(one.type_k, one.type_v) for one in layout.segments] == [("q8_0", "q4_0")]
    with pytest.raises(UsageError, match="the block that predicts: unknown K cache type"):
        LLM(path, n_ctx=128, progress=False, cache_type_k_draft="q9_0")


def test_a_file_without_a_head_is_refused(tmp_path: Path) -> None:
    path = hybrid("qwen35").write(tmp_path / "plain.gguf")
    with pytest.raises(UsageError, match=r"predicts further tokens: plain\.gguf has none"):
        LLM(path, n_ctx=128, progress=False, spec="mtp")


def test_a_damaged_head_is_refused_only_where_it_is_used(tmp_path: Path) -> None:
    made = hybrid("qwen35", predicts=True)
    del made.tensors["blk.4.nextn.hnorm.weight"]
    path = made.write(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=r"missing tensor 'blk\.4\.nextn\.hnorm\.weight'"):
        LLM(path, n_ctx=128, progress=False)
    with LLM(path, n_ctx=128, progress=False, spec="none") as llm:
        assert len(list(generated(llm.engine, PROMPT, 2, Speculation()))) == 2


def test_a_head_with_an_embedding_and_an_output_of_its_own(tmp_path: Path) -> None:
    made = hybrid("qwen35", predicts=True)
    rng = np.random.default_rng(1)
    shape = made.tensors["token_embd.weight"].shape
    for name in ("embed_tokens", "shared_head_head"):
        values = rng.standard_normal(shape).astype(np.float16).astype(np.float64)
        made.tensors[f"blk.4.nextn.{name}.weight"] = values
    del made.tensors["blk.4.nextn.shared_head_norm.weight"]
    model = load_model(made.write(tmp_path / "model.gguf"), cpu_backend(), predicts=True)[0]
    weights = model.weights.prediction
    assert weights is not None
    assert weights.model.token_embd is not model.weights.token_embd
    assert weights.model.output is not model.weights.output
    assert weights.model.output_norm is model.weights.output_norm
