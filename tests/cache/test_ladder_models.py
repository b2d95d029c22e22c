"""Caches with a budget of models with windows or recurrent layers beside full attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localkv.cache.cache_checks import check_cache
from localkv.cache.layout import PAGE_TOKENS, group_layouts, ladder_layout
from localkv.commands.plan.ladder import LadderPlan
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.prefix import Text
from localkv.engine.saved_state import load_state, save_state
from localkv.errors import DoesNotFitError
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.memory.fit import Budgeted
from localkv.memory.plan import ModelMemory
from localkv.model import Transformer
from support.forward import nmse
from support.hybrid_models import LAYERS, hybrid
from support.quick import quick
from support.random_model import variant

IDS = np.random.default_rng(5).integers(96, size=1000).tolist()
IDENTITY = {"architecture": "a", "model_name": "M", "model": "1", "rope": "[]", "smoothing": ""}
BACKENDS = {"cpu": cpu_backend, "reference": reference_backend}
NAMES = quick(["gemma3", "qwen35", "falcon-h1", "lfm2", "nemotron_h"], ["gemma3", "qwen35"])
Load = Callable[..., Transformer]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("ladder")

    def load(name: str, backend: str = "cpu") -> Transformer:
        path = folder / f"{name}.gguf"
        if not path.exists():
            (hybrid if name in LAYERS else variant)(name).write(path)
        return load_model(path, BACKENDS[backend]())[0]

    return load


def memory_of(model: Transformer, n_batch: int = 128) -> ModelMemory:
    return ModelMemory((), model.config, model.backend.name, n_batch, 1)


def fitted(model: Transformer, pages: float, ladder: str = "f16,q8_0", **settings) -> CacheConfig:
    """A cache whose budget has room for that many pages in f16, beside layers with a window."""
    config, memory = model.config, memory_of(model)
    cache = CacheConfig(n_ctx=1024, **settings)
    windows = Budgeted.of(1 << 30, ladder)
    wide, _ = windows.fitted(
        windows.cache(cache, config), memory, lambda: None, names_context=False
    )
    (group,) = (group for group in config.groups if not group.reach)
    page = (
        2 * PAGE_TOKENS * len(group.layers) * group.n_kv_heads * (group.key_dim + group.value_dim)
    )
    budgeted = Budgeted.of(int(wide.kv_window_bytes + pages * page), ladder)
    cache = budgeted.cache(cache, config)
    check_cache(cache, config.groups)
    return budgeted.fitted(cache, memory, lambda: None, names_context=False)[0]


def engine_of(model: Transformer, cache: CacheConfig) -> Engine:
    return Engine(model, cache, n_batch=128)


def next_logits(engine: Engine, ids: list[int]) -> np.ndarray:
    """The logits of a prompt's last token, and how many tokens it went on from."""
    text = Text(list(ids), len(ids))

    def work() -> np.ndarray:
        engine.slot.take(text)
        return np.array(engine.model.backend.arrays.to_numpy(engine.slot.logits(text)))

    return engine.slot.turn(work)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_what_the_plan_says_within_the_budget(load: Load, name: str) -> None:
    model = load(name)
    cache = fitted(model, 2.5)
    engine, plan = engine_of(model, cache), memory_of(model).plan(cache)
    assert engine.cache.n_bytes("k") == plan.cache_k
    assert engine.cache.n_bytes("v") == plan.cache_v
    assert plan.cache_k + plan.cache_v <= cache.kv_budget
    assert bool(cache.kv_window_bytes) == any(group.reach for group in model.config.groups)
    grown = LadderPlan(name, cache, memory_of(model)).growth
    assert len(grown) * PAGE_TOKENS >= cache.n_ctx
    engine.logits(IDS)
    engine.evaluate([1] * (cache.n_ctx - len(IDS)))
    rungs = [engine.cache.ladder.rungs[page] for page in engine.sequence.pages[_pool(engine)]]
    assert sum(rungs) > 0
    assert len(rungs) == len(grown)


def _pool(engine: Engine) -> int:
    return engine.cache.ladder.index


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_near_those_of_an_f16_cache_on_both_backends(load: Load, name: str) -> None:
    found = dict[str, np.ndarray]()
    for backend in BACKENDS:
        model = load(name, backend)
        engine = engine_of(model, fitted(model, 2.5))
        found[backend] = engine.logits(IDS)
        assert engine.cache.requantised.n_pages > 0
    plain = engine_of(load(name), CacheConfig(n_ctx=1024)).logits(IDS)
    assert 0 < nmse(found["cpu"], plain) < 2e-3
    assert nmse(found["cpu"], found["reference"]) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_texts_that_go_back_and_on_are_near_those_of_an_f16_cache(load: Load, name: str) -> None:
    model = load(name)
    plain, engine = engine_of(model, CacheConfig(n_ctx=1024)), engine_of(model, fitted(model, 2.5))
    for ids in (IDS, [*IDS[:900], 5, 6, 7], IDS[:300], IDS[:600]):
        wanted, got = next_logits(plain, ids), next_logits(engine, ids)
        assert nmse(got, wanted) < 2e-3
    assert engine.cache.requantised.n_pages > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_state_goes_on_with_the_same_bits(load: Load, name: str, tmp_path: Path) -> None:
    model = load(name)
    cache = fitted(model, 2.5)
    engine = engine_of(model, cache)
    engine.logits(IDS[:900])
    save_state(engine.slot, tmp_path / "text.state", IDENTITY)
    other = engine_of(model, cache)
    load_state(other.slot, tmp_path / "text.state", IDENTITY)
    assert other.cache.ladder.counts() == engine.cache.ladder.counts()
    assert other.cache.ladder.counts()[1] > 0
    for ids in (IDS[:920], IDS[:930]):
        np.testing.assert_array_equal(next_logits(other, ids), next_logits(engine, ids))


def test_windows_have_types_of_their_own(load: Load) -> None:
    model = load("gemma3")
    cache = fitted(model, 2.5, type_k_swa="q8_0", type_v_swa="q5_1")
    assert cache.kv_window_bytes < fitted(model, 2.5).kv_window_bytes
    layouts = group_layouts(cache, model.config.groups)
    others = [layout for layout in layouts if layout.budget is None]
    assert [(s.type_k, s.type_v) for layout in others for s in layout.segments] == [
        ("q8_0", "q5_1")
    ]
    assert ladder_layout(layouts).budget == cache.kv_budget - cache.kv_window_bytes
    assert engine_of(model, cache).logits(IDS).shape == (1000, 96)


def test_what_windows_do_not_leave_is_refused(load: Load) -> None:
    model = load("gemma3")
    cache = fitted(model, 2.5)
    for found, hint in ((cache, "-ub"), (fitted(model, 2.5, swa_full=True), "--swa-full")):
        budgeted = Budgeted.of(found.kv_window_bytes, None)
        asked = budgeted.cache(replace(found, kv_window_bytes=0), model.config)
        with pytest.raises(DoesNotFitError, match="layers with a window take") as refused:
            budgeted.fitted(asked, memory_of(model), lambda: None, names_context=False)
        assert hint in (refused.value.hint or "")


def test_windows_that_keep_all_rows_are_part_of_the_budget(load: Load) -> None:
    model = load("gemma3")
    cache = fitted(model, 2.5, swa_full=True)
    engine, plan = engine_of(model, cache), memory_of(model).plan(cache)
    assert engine.cache.n_bytes("k") == plan.cache_k
    assert engine.cache.n_bytes("v") == plan.cache_v
    assert plan.cache_k + plan.cache_v <= cache.kv_budget
    engine.logits(IDS)
    assert engine.cache.requantised.n_pages > 0
    assert engine.truncate(300) == 300
    wanted = engine_of(model, CacheConfig(n_ctx=1024, swa_full=True))
    for ids in ([*IDS[:300], 5, 6, 7], IDS):
        assert nmse(next_logits(engine, ids), next_logits(wanted, ids)) < 2e-3
