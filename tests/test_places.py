"""Models in several places: the bytes of one place on CPUs, and other backends within theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from localkv import LLM
from localkv.arch.placement import Placement
from localkv.cache.layout import PAGE_TOKENS, cache_bytes, group_layouts
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.engine.prefix import Text
from localkv.engine.saved_state import load_state, save_state
from localkv.engine.speculation.config import Speculation
from localkv.errors import UsageError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.places import Places
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.memory.fit import Budgeted
from localkv.sampling.params import SamplingParams
from localkv.sampling.sampler import Sampler
from support.dense_variants import dense_variant
from support.encoder_models import TEXTS, write_encoder
from support.expert_models import EXPERT_MODELS
from support.forward import nmse
from support.hybrid_models import hybrid
from support.random_gemma import RandomGemma
from support.random_model import RandomModel

N_VOCAB = 96
PROMPT = [(i * 37 + 11) % N_VOCAB for i in range(70)]
Write = Callable[[Path], Path]

MODELS: dict[str, Write] = {
    "llama": lambda path: RandomModel().write(path, GGMLType.Q8_0),
    "windows": lambda path: dense_variant("cohere2").write(path),  # parallel blocks, too
    "gemma2": lambda path: dense_variant("gemma2").write(path),
    "gemma3n": lambda path: RandomGemma("gemma3n").write(path, GGMLType.Q8_0),
    "grok": lambda path: EXPERT_MODELS["grok"].write(path),
    "deepseek": lambda path: EXPERT_MODELS["deepseek"].write(path),
    "latent": lambda path: hybrid("kimi-linear").write(path),
    "qwen35": lambda path: hybrid("qwen35").write(path),
    "granitehybrid": lambda path: hybrid("granitehybrid").write(path),
    "lfm2": lambda path: hybrid("lfm2").write(path),
}


def engine_of(
    path: Path,
    places: Backend | Callable[[int], Placement],
    backends: tuple[Backend, ...] = (),
    cache: CacheConfig | None = None,
    n_between: int = 0,
) -> Engine:
    """An engine of a model in one place, or in what a number of layers is placed in."""
    if not isinstance(places, Backend):
        config = load_model(path, cpu_backend())[0].config
        placement = places(config.n_layers).with_shared_rows(config)
        places = Places(backends or (cpu_backend(), cpu_backend()), placement)
    model, unused = load_model(path, places)
    assert not unused
    return Engine(model, cache or CacheConfig(n_ctx=256), n_batch=32, n_between=n_between)


def halves(n: int) -> Placement:
    """The first layers and the embedding in one place, the others in another."""
    layers = tuple(int(i >= n // 2) for i in range(n))
    return Placement(("one", "two"), layers, layers, 0, 1)


def turns(n: int) -> Placement:
    """Layers in turn, and each block where its layer isn't."""
    layers = tuple(i % 2 for i in range(n))
    return Placement(("one", "two"), layers, tuple(1 - i for i in layers), 1, 0)


def blocks_apart(n: int) -> Placement:
    """All feed-forward blocks in another place, as experts are with --cpu-moe."""
    return Placement(("one", "two"), (0,) * n, (1,) * n, 0, 0)


PLACEMENTS = [halves, turns, blocks_apart]


def said(engine: Engine) -> tuple[list[np.ndarray], list[int]]:
    """Logits of a prompt and of some generated tokens; and an answer."""
    to_numpy = engine.model.backend.arrays.to_numpy
    parts = [to_numpy(engine.logits(PROMPT))]
    for token in (5, 17, 3):
        parts.append(to_numpy(engine.evaluate([token], generated=True)).copy())
    parts.append(to_numpy(engine.evaluate([9, 8, 7], "all", generated=True)).copy())
    sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=N_VOCAB)
    options = GenerationOptions(sampler=sampler, max_tokens=8)
    return parts, list(BatchEngine(engine).generate(PROMPT[:20], options))


@pytest.mark.parametrize("name", MODELS)
def test_cpu_places_give_the_bytes_of_one(name: str, tmp_path: Path) -> None:
    path = MODELS[name](tmp_path / "model.gguf")
    want, answer = said(engine_of(path, cpu_backend()))
    for placement in PLACEMENTS:
        got, text = said(engine_of(path, placement))
        assert [part.tobytes() for part in got] == [part.tobytes() for part in want]
        assert text == answer


@pytest.mark.parametrize(
    ("name", "placement"),
    [("windows", turns), ("gemma3n", halves), ("deepseek", blocks_apart), ("qwen35", turns)],
)
def test_another_backend_agrees(
    name: str, placement: Callable[[int], Placement], tmp_path: Path
) -> None:
    """NumPy's arrays and torch's, from one to the other and back."""
    path = MODELS[name](tmp_path / "model.gguf")
    want = said(engine_of(path, reference_backend()))[0][0]
    apart = nmse(said(engine_of(path, cpu_backend()))[0][0], want)  # 8-bit activations
    for backends in ((cpu_backend(), reference_backend()), (reference_backend(), cpu_backend())):
        got = said(engine_of(path, placement, backends))[0][0]
        assert nmse(got, want) <= 1e-5 + 2 * apart


def test_packed_caches_with_tails(tmp_path: Path) -> None:
    path = MODELS["windows"](tmp_path / "model.gguf")
    cache = CacheConfig("q8_0", "q4_0", n_ctx=256, kv_tail=40, kv_sink=4)
    want = said(engine_of(path, cpu_backend(), cache=cache))
    got = said(engine_of(path, halves, cache=cache))
    assert [part.tobytes() for part in got[0]] == [part.tobytes() for part in want[0]]
    assert got[1] == want[1]


LONG = [(i * 31 + 7) % N_VOCAB for i in range(900)]
IDENTITY = {"model": "0"}


def following(engine: Engine, ids: list[int], n_there: int = 0) -> bytes:
    """The logits after a text, some of whose rows are there."""
    slot, text = engine.slot, Text(ids, len(ids))

    def work() -> bytes:
        reuse = slot.take(text)
        assert reuse.n_reused >= n_there
        out = slot.logits(text)
        return np.asarray(engine.model.backend.arrays.to_numpy(out)).tobytes()

    return slot.turn(work)


@pytest.mark.parametrize("placement", [halves, turns])
def test_pages_change_their_types_in_all_places(
    placement: Callable[[int], Placement], tmp_path: Path
) -> None:
    """A cache with a budget, and a state of it that goes on in one place."""
    path = MODELS["llama"](tmp_path / "model.gguf")
    config = load_model(path, cpu_backend())[0].config
    page = sum(cache_bytes(group_layouts(CacheConfig(), config.groups), n_ctx=PAGE_TOKENS))
    budgeted = Budgeted.of(int(2.5 * page), "f16,q8_0")
    cache = replace(budgeted.cache(CacheConfig(n_ctx=1024), config), kv_budget=int(2.5 * page))
    one, several = (engine_of(path, at, cache=cache) for at in (cpu_backend(), placement))
    assert several.logits(LONG).tobytes() == one.logits(LONG).tobytes()
    assert several.cache.requantised.n_pages == one.cache.requantised.n_pages > 0
    assert save_state(several.slot, tmp_path / "text.state", IDENTITY) == len(LONG)
    other = engine_of(path, cpu_backend(), cache=cache)
    ids = load_state(other.slot, tmp_path / "text.state", IDENTITY)
    assert ids == LONG
    assert following(other, [*ids, 1, 2], 800) == following(one, [*ids, 1, 2])


@pytest.mark.parametrize("name", ["qwen35", "windows"])
def test_states_go_from_one_place_to_several_and_back(name: str, tmp_path: Path) -> None:
    path = MODELS[name](tmp_path / "model.gguf")
    one, several = (engine_of(path, at, n_between=2) for at in (cpu_backend(), turns))
    following(one, PROMPT)
    for source, target in ((one, several), (several, engine_of(path, cpu_backend()))):
        save_state(source.slot, tmp_path / "text.state", IDENTITY)
        ids = load_state(target.slot, tmp_path / "text.state", IDENTITY)
        assert following(target, [*ids, 4], 60) == following(one, [*ids, 4])


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_guesses_leave_the_text_as_it_is(name: str, tmp_path: Path) -> None:
    """A prompt that repeats itself is guessed on, and states of recurrent layers go back."""
    path = MODELS[name](tmp_path / "model.gguf")
    texts = []
    for at in (cpu_backend(), turns):
        engine = engine_of(path, at, n_between=3)
        sampler = Sampler(SamplingParams(temperature=0.0), n_vocab=N_VOCAB)
        guesses = Speculation("ngram", draft_max=3)
        options = GenerationOptions(sampler=sampler, max_tokens=40, speculation=guesses)
        texts.append(list(BatchEngine(engine).generate([5, 6, 7, 8] * 8, options)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["bert", "gemma-embedding"])
def test_encoders(name: str, tmp_path: Path) -> None:
    path = write_encoder(name, tmp_path / "model.gguf")
    n_layers = load_model(path, cpu_backend())[0].config.n_layers
    want = load_model(path, cpu_backend())[0].encode(TEXTS)
    for backends in ((cpu_backend(), cpu_backend()), (cpu_backend(), reference_backend())):
        for placement in PLACEMENTS:
            model = load_model(path, Places(backends, placement(n_layers)))[0]
            got = model.backend.arrays.to_numpy(model.encode(TEXTS))
            assert nmse(got, want) <= (0 if backends[1].name == "cpu" else 1e-4)


def test_what_needs_one_place_is_left_out(tmp_path: Path) -> None:
    """Chains that run again know all layers and the head."""
    model = engine_of(MODELS["llama"](tmp_path / "model.gguf"), halves).model
    assert not model.can_start_later
    assert not model.backend.records
    assert model.next_logits([1], [1], None, 64) is None  # type: ignore[arg-type]


def test_a_cache_that_takes_what_is_free(tiny_model: Path) -> None:
    """A server asks for it so; `--kv-budget auto` is refused."""
    options = {"device": "reference", "n_gpu_layers": 2, "n_ctx": 256, "progress": False}
    llm = LLM(tiny_model, n_cache_tokens="fit", n_parallel=8, **options)
    assert llm.cache.n_tokens == 4 * 256
    assert [device for device, _ in llm.memory.places] == ["reference", "cpu"]
    places = sum(plan.cache_k + plan.cache_v for _, plan in llm.memory.places)
    assert places == llm.engine.cache.n_bytes("k") + llm.engine.cache.n_bytes("v")
    with pytest.raises(UsageError, match="needs a model in one place"):
        LLM(tiny_model, kv_budget="auto", **options)
