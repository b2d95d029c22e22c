"""What is refused before it is allocated, and what is said instead."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType
from hypothesis import given
from hypothesis import strategies as st

from localkv import LLM
from localkv.cache.cache_checks import check_cache
from localkv.cache.ladder import DEFAULT_LADDER
from localkv.cache.layout import PAGE_TOKENS, fits_head, mean_bits
from localkv.chat.engine import EngineOptions
from localkv.config import USUAL_PAIRS, CacheConfig
from localkv.engine_process.conversation import LocalEngine
from localkv.errors import DoesNotFitError, UsageError
from localkv.kernels.gpu.device import CudaMemory
from localkv.loader.gguf_file import open_gguf
from localkv.loader.known_models import KNOWN_MODELS, shape_tensors
from localkv.loader.model_header import model_spec
from localkv.memory.advice import ROUNDING_KLD, RoundingCost, recommend, rounding_cost
from localkv.memory.fit import Budgeted, check_fit, free_memory, smaller_pairs, usual_pairs
from localkv.memory.plan import ModelMemory
from localkv.quant_formats import KV_FORMATS
from localkv.simd.cpu_features import HAS_BYTE_DOTS
from localkv.system.machine_memory import Budget
from support.layouts import with_attention
from support.paths import ROOT
from support.program import Program
from support.random_model import RandomModel

GIB = 1 << 30


def shape_memory(name: str = "llama-8b", type_name: str = "q4_K", **changes: Any) -> ModelMemory:
    options = {"backend": "cpu", "n_batch": 512, "n_threads": 4, **changes}
    return ModelMemory(shape_tensors(name, type_name), KNOWN_MODELS[name].spec, **options)


def budget(n_bytes: int) -> Budget:
    return Budget(n_bytes, "available")


# -- the longest context


@pytest.mark.slow
@given(
    st.sampled_from(["llama-tiny", "llama-1b", "qwen3-30b-a3b"]),
    st.sampled_from(["cpu", "cuda", "reference"]),
    st.sampled_from(["f16", "q8_0", "q4_0", "fp8_e4m3_token"]),
    st.sampled_from(["f16", "q5_1", "iq4_nl"]),
    st.integers(1, 3),
    st.integers(0, 30 * GIB),
    st.booleans(),
)
def test_the_longest_context_fits_and_a_page_more_does_not(
    shape: str,
    backend: str,
    type_k: str,
    type_v: str,
    n_sequences: int,
    n_bytes: int,
    only_resident: bool,
) -> None:
    memory = shape_memory(shape, "q4_0", backend=backend)
    cache = CacheConfig(type_k, type_v, n_sequences=n_sequences)
    n_ctx = memory.longest_context(cache, n_bytes, only_resident=only_resident)
    assert n_ctx % PAGE_TOKENS == 0

    def takes(n_tokens: int) -> int:
        plan = memory.plan(replace(cache, n_ctx=n_tokens))
        return plan.resident if only_resident else plan.total

    assert n_ctx == 0 or takes(n_ctx) <= n_bytes
    assert takes(n_ctx + PAGE_TOKENS) > n_bytes


def test_nothing_is_long_enough_for_no_memory() -> None:
    assert shape_memory().longest_context(CacheConfig(), 0) == 0
    assert shape_memory().longest_context(CacheConfig(), -1) == 0


# -- what would fit instead


def suggestions(line: str) -> tuple[list[int], list[tuple[str, str]]]:
    """The contexts and pairs of types that a refusal offers."""
    offered = line.split("; ")[1]
    contexts = [int(n) for n in re.findall(r"-c (\d+)", offered)]
    return contexts, re.findall(r"-ctk (\S+) -ctv (\S+)", offered)


@pytest.mark.slow
@given(
    st.sampled_from(["llama-1b", "llama-8b", "qwen3-30b-a3b"]),
    st.sampled_from([(k, v) for k in KV_FORMATS for v in KV_FORMATS]),
    st.integers(1, 1 << 19),
    st.integers(1, 80 * GIB),
)
def test_what_is_refused_does_not_fit_and_what_is_offered_does(
    shape: str, pair: tuple[str, str], n_ctx: int, n_bytes: int
) -> None:
    memory = shape_memory(shape)
    cache = CacheConfig(*pair, n_ctx=n_ctx)
    plan = memory.plan(cache)
    if plan.resident <= n_bytes:
        assert (check_fit(memory, cache, budget(n_bytes)) is None) == (plan.total <= n_bytes)
        return
    with pytest.raises(DoesNotFitError) as caught:
        check_fit(memory, cache, budget(n_bytes))
    message = caught.value.message
    assert "\n" not in message
    contexts, pairs = suggestions(message)
    if len(contexts) == len(pairs) == 1 and " or " not in message:  # both together
        assert memory.plan(CacheConfig(*pairs[0], n_ctx=contexts[0])).resident <= n_bytes
        return
    for context in contexts:
        assert memory.plan(CacheConfig(*pair, n_ctx=context)).resident <= n_bytes
    for types in pairs:
        assert memory.plan(CacheConfig(*types, n_ctx=n_ctx)).resident <= n_bytes
    if not contexts and not pairs:
        assert message.endswith("a smaller file of the model is needed")
        for types in usual_pairs(memory.config):
            page = memory.plan(CacheConfig(*types, n_ctx=PAGE_TOKENS))
            assert page.resident > n_bytes or types not in smaller_pairs(memory, cache)


def test_the_line_names_both_ways_out() -> None:
    memory = shape_memory()
    with pytest.raises(DoesNotFitError) as caught:
        check_fit(memory, CacheConfig(n_ctx=1 << 17), budget(15 * GIB))
    longest = memory.longest_context(CacheConfig(), 15 * GIB, only_resident=True)
    resident = memory.plan(CacheConfig(n_ctx=1 << 17)).resident / GIB
    assert caught.value.message == (
        "K and V of 131072 tokens in f16/f16 take 16.00 GiB, with weights and scratch "
        f"{resident:.2f} GiB, but 15.00 GiB is available; "
        f"-c {longest} or -ctk q8_0 -ctv q8_0 would fit"
    )
    assert caught.value.hint == ("localkv plan shows all that fits; --fit off tries it anyway")


def test_only_fewer_bytes_are_offered() -> None:
    memory = shape_memory()
    pairs = list(USUAL_PAIRS)
    assert smaller_pairs(memory, CacheConfig("f32", "f32")) == pairs
    assert smaller_pairs(memory, CacheConfig("q8_0", "q8_0")) == pairs[2:]
    assert smaller_pairs(memory, CacheConfig("q4_0", "q4_0")) == []


def test_heads_without_whole_blocks() -> None:
    config = with_attention(KNOWN_MODELS["llama-tiny"].spec, key_dim=80, value_dim=80)
    assert usual_pairs(config) == [("f16", "f16"), ("fp8_e4m3_token", "fp8_e4m3_token")]
    assert all(fits_head(name, config) for pair in usual_pairs(config) for name in pair)


@pytest.mark.parametrize(("dim", "n_pairs"), [(64, 5), (96, 4)])
def test_default_ladder_ends_in_types_that_heads_fit(dim: int, n_pairs: int) -> None:
    config = with_attention(KNOWN_MODELS["llama-tiny"].spec, key_dim=dim, value_dim=dim)
    cache = Budgeted.of(1 << 30, None).cache(CacheConfig(), config)
    assert cache.kv_ladder == DEFAULT_LADDER[:n_pairs]
    check_cache(cache, config.groups)
    named = Budgeted.of(1 << 30, DEFAULT_LADDER).cache(CacheConfig(), config)
    assert named.kv_ladder == DEFAULT_LADDER


# -- rounded activations


def test_rounding_costs_what_the_page_says() -> None:
    page = (ROOT / "docs" / "quality.md").read_text()
    rows = page.partition("<!-- activations -->")[2].partition("<!-- end of activations -->")[0]
    cells = [row.replace(" ", "").split("|") for row in rows.splitlines() if "0.00" in row]
    found = {cell[1].removesuffix("_M"): (float(cell[2]), float(cell[4])) for cell in cells[1:]}
    assert found == {name.upper(): klds for name, klds in ROUNDING_KLD.items()}


@pytest.mark.parametrize(
    ("type_name", "changes", "cost"),
    [
        ("q4_0", {}, RoundingCost("q4_0", 0.0024, 0.0032)),
        ("q4_1", {}, RoundingCost("q4_1", 0.0019, 0.0032)),
        ("q4_0", {"activations": "exact"}, None),
        ("q4_0", {"backend": "cuda"}, None),
        ("f16", {}, None),
        ("bf16", {}, None),
    ],
)
def test_what_rounding_costs_with_a_model(
    type_name: str, changes: dict[str, Any], cost: RoundingCost | None
) -> None:
    memory = shape_memory(type_name=type_name, **changes)
    assert rounding_cost(memory) == (cost if HAS_BYTE_DOTS else None)


# -- the recommendation


@pytest.mark.slow
@given(st.integers(1, 1 << 18), st.integers(0, 60 * GIB), st.sampled_from(["llama-8b", "llama-3b"]))
def test_a_recommendation_fits_and_no_better_pair_does(
    n_ctx: int, n_bytes: int, shape: str
) -> None:
    memory = shape_memory(shape)
    pairs = usual_pairs(memory.config)
    advice = recommend(memory, CacheConfig(n_ctx=n_ctx), pairs, n_bytes)
    assert "\n" not in advice.reason
    if advice.pair is None or advice.quant is not None:
        shortest = min(n_ctx, PAGE_TOKENS)  # contexts are recommended in whole pages
        assert memory.plan(CacheConfig("q4_0", "q4_0", n_ctx=shortest)).total > n_bytes
        return
    assert memory.plan(CacheConfig(*advice.pair, n_ctx=advice.n_ctx)).total <= n_bytes
    better = [
        p for p in pairs if mean_bits(p, memory.config) > mean_bits(advice.pair, memory.config)
    ]
    for pair in better:
        assert memory.plan(CacheConfig(*pair, n_ctx=n_ctx)).total > n_bytes
    if advice.n_ctx < n_ctx:
        assert advice.pair == pairs[-1]


# -- before a model is loaded


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A little of Q4_0 weights, which are copied, and a cache that can be much larger."""
    model = RandomModel(n_embd=256, n_kv_heads=4, n_ff=256, n_ctx=1 << 20)
    return model.write(tmp_path / "wide.gguf", GGMLType.Q4_0)


@pytest.fixture
def has_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how much memory this machine has."""

    def set_memory(n_bytes: int | None) -> None:
        found = None if n_bytes is None else budget(n_bytes)
        monkeypatch.setattr("localkv.memory.fit.machine_memory", lambda: found)

    return set_memory


def never(*_: object, **__: object) -> None:
    pytest.fail("something was loaded")


def test_complete_refuses_before_it_loads(
    program: Program, wide: Path, has_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_memory(100 << 20)
    monkeypatch.setattr("localkv.llm.load_model", never)
    result = program("complete", "-m", wide, "-p", "x", "-c", "100000")
    assert (result.code, result.out) == (1, "")
    assert len(result.err_lines) == 2
    assert result.err_lines[0].startswith(
        "error: K and V of 100000 tokens in f16/f16 take 195.50 MiB, with weights and scratch "
    )
    assert result.err_lines[0].endswith("-ctk q8_0 -ctv q4_0 would fit")
    assert result.err_lines[1].startswith("hint: localkv plan")


def test_what_is_offered_is_taken(wide: Path, has_memory: Any) -> None:
    has_memory(100 << 20)
    with pytest.raises(DoesNotFitError) as caught:
        LLM(wide, n_ctx=100000)
    (context,), ((type_k, type_v),) = suggestions(caught.value.message)
    assert LLM(wide, n_ctx=context).cache.n_ctx == context
    llm = LLM(wide, n_ctx=100000, cache_type_k=type_k, cache_type_v=type_v)
    assert llm.memory.resident <= 100 << 20


def test_fit_off_tries_and_an_unknown_memory_is_no_limit(wide: Path, has_memory: Any) -> None:
    has_memory(1 << 10)
    assert LLM(wide, n_ctx=512, fit="off").warnings == []
    has_memory(None)
    assert LLM(wide, n_ctx=512).warnings == []
    with pytest.raises(UsageError, match="unknown fit 'maybe'"):
        LLM(wide, fit="maybe")


def test_mapped_weights_are_warned_of_only(tmp_path: Path, has_memory: Any) -> None:
    path = RandomModel(n_vocab=4096).write(tmp_path / "m.gguf", GGMLType.F16)
    gguf = open_gguf(path)
    memory = ModelMemory(tuple(gguf.tensors.values()), model_spec(gguf), "cpu", 512, 1)
    plan = memory.plan(CacheConfig(n_ctx=512))
    assert plan.weights_mapped > 1 << 20
    has_memory(plan.total - (1 << 20))
    (warning,) = LLM(path, n_ctx=512).warnings
    assert warning.endswith("of memory is left to keep them in: expect it to be slow")
    has_memory(plan.total + (1 << 20))
    assert LLM(path, n_ctx=512).warnings == []


def test_a_gpu_s_room_is_what_torch_can_still_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch keeps for later counts as free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * GIB)
    assert free_memory(SimpleNamespace(memory=CudaMemory(torch.device("cuda")))) == Budget(
        3 * GIB, "free on the GPU"
    )


def test_the_chat_s_engine_refuses_too(wide: Path, has_memory: Any) -> None:
    has_memory(100 << 20)
    engine = LocalEngine(EngineOptions(str(wide), {"n_ctx": 100000}, None))
    with pytest.raises(DoesNotFitError, match="would fit"):
        engine.load(lambda _: None)


def test_a_sweep_is_refused_before_it_measures(
    program: Program, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once loaded, there has to be room for the largest cache of the list and for the base."""
    text = tmp_path / "t.txt"
    text.write_text("The fox said hello to the owl. " * 40)
    free = iter([budget(GIB)])
    monkeypatch.setattr("localkv.memory.fit.machine_memory", lambda: next(free, budget(1 << 10)))
    monkeypatch.setattr("localkv.quality.scores.score_chunks", never)
    argv = ("perplexity", "-m", tiny_model, "-f", text, "-c", "256", "--sweep", "f32/f32")
    result = program(*argv)
    assert result.code == 1
    assert "K and V of 256 tokens in f32/f32 take 256.00 KiB" in result.err
