"""Measuring what packing costs after the prompt: what a batch sees, and what that hides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from localkv import LLM
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import GroupLayout, SegmentSpec, cache_segments
from localkv.config import CacheConfig
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.quality.scores import (
    ExactPrefillCache,
    base_cache,
    divergence,
    joined,
    score_chunks,
    text_chunks,
)
from support.forward import IDS, nmse, run
from support.layouts import group_of
from support.program import Program
from support.random_model import RandomModel, variant

TEXT = "The fox said hello to the owl, and the owl said hello to the fox. " * 12
LONG = (IDS * 4)[:600]
BACKENDS = pytest.mark.parametrize(
    ("backend", "tolerance"),
    [(reference_backend(torch.float64), 1e-20), (cpu_backend(), 1e-9)],
    ids=["float64", "cpu"],
)


def stored(model: Transformer, segments: list[SegmentSpec]) -> dict[str, Any]:
    """Arguments of a cache."""
    layouts = [GroupLayout(group, tuple(segments)) for group in model.config.groups]
    return {"layouts": layouts, "n_ctx": 640, "arrays": model.backend.arrays}


@BACKENDS
@pytest.mark.parametrize(("n_batch", "n_tokens"), [(1, 9), (7, 40), (256, 300), (300, 600)])
def test_f32_rows_are_the_same_either_way(
    tmp_path: Path, backend: Backend, tolerance: float, n_batch: int, n_tokens: int
) -> None:
    model, _ = load_model(RandomModel().write(tmp_path / "m.gguf", GGMLType.F32), backend)
    ids = LONG[:n_tokens]
    spec = [SegmentSpec("f32", "f32")]
    want = run(model, KVCache(**stored(model, spec)), ids, chunk=n_batch)
    cache = ExactPrefillCache(**stored(model, spec), n_batch=n_batch)
    assert nmse(run(model, cache, ids, chunk=n_batch), want) < tolerance


@BACKENDS
def test_groups_of_layers_have_rows_of_their_own(
    tmp_path: Path, backend: Backend, tolerance: float
) -> None:
    model, _ = load_model(variant("gemma3").write(tmp_path / "m.gguf", GGMLType.F32), backend)
    assert len(model.config.groups) == 2
    spec = [SegmentSpec("f32", "f32")]
    want = run(model, KVCache(**stored(model, spec)), LONG[:40], chunk=7)
    cache = ExactPrefillCache(**stored(model, spec), n_batch=7)
    assert nmse(run(model, cache, LONG[:40], chunk=7), want) < tolerance


@BACKENDS
@pytest.mark.parametrize("start", [130, 256, 300])
def test_only_earlier_batches_are_seen_packed(
    tmp_path: Path, backend: Backend, tolerance: float, start: int
) -> None:
    """In a model of one layer that is a cache with packed rows up to the last batch."""
    path = RandomModel(n_layers=1).write(tmp_path / "m.gguf", GGMLType.F32)
    model, _ = load_model(path, backend)
    ids = LONG[: 2 * start]
    (packed,) = cache_segments(CacheConfig("q4_0", "q5_1"), group_of(64))
    last = slice(start, None)
    segments = [packed, SegmentSpec("f32", "f32", start)]
    want = run(model, KVCache(**stored(model, segments)), ids, chunk=start)[last]
    cache = ExactPrefillCache(**stored(model, [packed]), n_batch=start)
    got = run(model, cache, ids, chunk=start)[last]
    assert nmse(got, want) < tolerance
    through = run(model, KVCache(**stored(model, [packed])), ids, chunk=start)[last]
    assert nmse(through, want) > 1e-4


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, n_ctx=64)


def mean_kld(llm: LLM, types: str, **options: object) -> float:
    chunks = text_chunks(llm.tokenize(TEXT), 64, bos_id=1, limit=3)
    cache = CacheConfig(types, types, n_ctx=64)
    parts = score_chunks(llm.engine.model, chunks, [cache], base=base_cache(64), **options)
    return divergence(joined([scores for (scores,) in parts])).kld.value


@pytest.mark.parametrize("n_batch", [16, 24])
def test_it_hides_a_part_of_the_cost(llm: LLM, n_batch: int) -> None:
    through = mean_kld(llm, "q4_0", n_batch=n_batch)
    hidden = mean_kld(llm, "q4_0", n_batch=n_batch, prefill_exact=True)
    assert 0 < hidden < 0.9 * through


def test_it_hides_all_of_it_in_one_batch(llm: LLM) -> None:
    """What is left is that the base is f16."""
    assert mean_kld(llm, "q4_0", prefill_exact=True) < 0.01 * mean_kld(llm, "q4_0")
    assert mean_kld(llm, "q4_0", prefill_exact=True) == pytest.approx(
        mean_kld(llm, "f32"), rel=0.05
    )


def test_it_makes_no_difference_to_f32(llm: LLM) -> None:
    through = mean_kld(llm, "f32", n_batch=16)
    exact = mean_kld(llm, "f32", n_batch=16, prefill_exact=True)
    assert exact == pytest.approx(through, rel=0.05)


def test_the_results_say_so(program: Program, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    argv = ("perplexity", "-m", tiny_model, "-f", path, "-c", 64, "-ub", 16, "--prefill-exact")
    mode = "prefill exact in batches of 16"
    result = program(*argv, "-ctk", "q4_0")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("Final estimate: PPL = ")
    assert result.out.endswith(f", {mode}\n")
    assert program(*argv, "--sweep", "q4_0/q4_0,f16/f16").out.splitlines()[3:] == [mode]
    report = json.loads(program(*argv, "--sweep", "q4_0/q4_0", "--json").out)
    assert (report["prefill_exact"], report["n_batch"]) == (True, 16)
