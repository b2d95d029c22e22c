"""What commands say of layers with a window: where the bytes are, types of their own, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localkv import LLM
from localkv.cache.layout import PAGE_TOKENS, context_bytes
from localkv.chat.cache_figures import cache_figures
from localkv.config import CacheConfig
from localkv.engine_process.conversation import engine_facts
from localkv.errors import UsageError
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_header import model_spec
from localkv.memory.plan import ModelMemory
from support.program import Program
from support.random_model import variant

N_CTX = 8192
ROWS = 5 * PAGE_TOKENS
"""The rows of layers with a window of 7."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with a window of 7, and one without."""
    return variant("gemma3", n_ctx=N_CTX).write(tmp_path_factory.mktemp("cli") / "model.gguf")


@pytest.fixture(scope="module")
def memory(path: Path) -> ModelMemory:
    gguf = open_gguf(path)
    return ModelMemory(tuple(gguf.tensors.values()), model_spec(gguf), "cpu", 512, 2)


def groups_of(result: Any) -> list[tuple[int, int, str, str, int]]:
    names = ("layers", "window", "type_k", "type_v", "n_rows")
    return [tuple(group[name] for name in names) for group in result]


def test_plan_shows_where_the_bytes_are(program: Program, path: Path) -> None:
    asked = ("plan", path, "--memory", "1GiB", "-ctk", "q8_0", "-ctv", "q4_0", "-ctk-swa", "f16")
    (pair,) = json.loads(program(*asked, "--json").out)["pairs"]
    assert groups_of(pair["groups"]) == [(2, 7, "f16", "q4_0", ROWS), (1, 0, "q8_0", "q4_0", N_CTX)]
    for side in ("cache_k", "cache_v"):
        assert pair[side] == sum(group[side] for group in pair["groups"])
    lines = program(*asked).out.splitlines()
    at = lines.index("Where the bytes of q8_0/q4_0 are:")
    cells = [line.split() for line in lines[at + 1 : at + 4]]
    assert cells[0][:3] == ["layers", "KV", "heads"]
    assert cells[1][:8] == ["2", "2", "of", "64", "7", "tokens", "f16/q4_0", str(ROWS)]
    assert cells[2][:7] == ["1", "2", "of", "64", "all", "q8_0/q4_0", str(N_CTX)]
    assert lines[-1].endswith('-ctk q8_0 -ctv q4_0 -ctk-swa f16 -p "Once upon a time"')


def test_the_memory_line_names_types_of_windows(program: Program, path: Path) -> None:
    asked = ("complete", "-m", path, "-c", "2048", "-ctk", "q8_0", "-n", "1", "-p", "a")
    assert "K q8_0 (windows f16) " in program(*asked, "-ctk-swa", "f16", "-ctv-swa", "f16").err
    assert "windows f16" not in program(*asked, "-ctv-swa", "f16").err


def test_the_longest_context_fits_and_a_page_more_does_not(memory: ModelMemory) -> None:
    """Although the bytes of a page say little where most layers have stopped growing."""
    for cache in (CacheConfig(), CacheConfig("q8_0", "q4_0", n_sequences=3)):
        base = memory.plan(replace(cache, n_ctx=PAGE_TOKENS))
        for more in (0, 1 << 18, 1 << 21, 1 << 25):
            n_bytes = base.total + more
            n_ctx = memory.longest_context(cache, n_bytes)
            assert n_ctx % PAGE_TOKENS == 0
            assert memory.plan(replace(cache, n_ctx=n_ctx)).total <= n_bytes
            assert memory.plan(replace(cache, n_ctx=n_ctx + PAGE_TOKENS)).total > n_bytes
    page = memory.plan(CacheConfig(n_ctx=PAGE_TOKENS))
    by_page = (1 << 25) // (page.cache_k + page.cache_v) * PAGE_TOKENS
    assert memory.longest_context(CacheConfig(), page.total + (1 << 25)) > 2 * by_page


def test_all_is_kept_if_asked_for(memory: ModelMemory) -> None:
    full, some = (memory.plan(CacheConfig(n_ctx=N_CTX, swa_full=full)) for full in (True, False))
    assert [group.n_rows for group in full.groups] == [N_CTX, N_CTX]
    assert full.cache_k == 3 * some.groups[1].cache_k
    rows = 2 * 2 * 64 * 2
    assert context_bytes(CacheConfig(n_ctx=N_CTX), memory.config, 512) == rows * (2 * ROWS + N_CTX)


def test_show_counts_windows(program: Program, path: Path) -> None:
    result = program("show", path, "--json")
    row = next(r for r in json.loads(result.out)["kv_cache"] if r["type"] == "f16")
    rows = 2 * 64 * 2
    assert row["bytes_per_token_k"] == row["bytes_per_token_v"] == rows
    assert row["bytes_full_context"] == 2 * rows * (2 * ROWS + N_CTX)
    assert program("show", path).out.splitlines()[-2:] == [
        f"2 of 3 layers see 7 tokens, and keep {ROWS} of the context.",
        "Bytes per token are for the other layers.",
    ]


@pytest.mark.parametrize("flags", [("-ctk-swa", "q8_0"), ("-ctv-swa", "q8_0"), ("--swa-full",)])
@pytest.mark.parametrize("command", ["complete", "plan", "bench"])
def test_a_model_without_windows_has_no_use_for_them(
    program: Program, tiny_model: Path, flags: tuple[str, ...], command: str
) -> None:
    more = {"complete": ("-p", "x"), "plan": ("--memory", "1GiB"), "bench": ()}[command]
    result = program(command, "-m", tiny_model, *more, *flags)
    assert result.code in (1, 2)
    assert f"{flags[0]} is about layers with a window, and this model has none" in result.err


def test_llm_has_types_and_rows_of_windows(path: Path) -> None:
    with LLM(
        path, n_ctx=2048, cache_type_k="q8_0", cache_type_k_swa="f16", device="cpu", progress=False
    ) as llm:
        cache = llm.engine.cache
        assert (cache.n_bytes("k"), cache.n_bytes("v")) == (llm.memory.cache_k, llm.memory.cache_v)
        assert [group.type_k for group in llm.memory.groups] == ["f16", "q8_0"]
        figures = cache_figures(engine_facts(llm, 0.0))
        assert (figures.bytes_k, figures.bytes_v) == (llm.memory.cache_k, llm.memory.cache_v)
        assert figures.windows == ((2, 3, ROWS),)
    with pytest.raises(UsageError, match="unknown K cache type 'nope'"):
        LLM(path, cache_type_k_swa="nope", device="cpu")


def test_scales_are_wanted_for_types_of_windows(path: Path) -> None:
    with pytest.raises(UsageError, match="fp8_e4m3_head needs a file of scales"):
        LLM(path, cache_type_v_swa="fp8_e4m3_head", device="cpu")


def test_a_base_is_of_one_pair_of_types(program: Program, path: Path, tmp_path: Path) -> None:
    asked = ("perplexity", "-m", path, "-f", path, "--save-base", tmp_path / "base")
    result = program(*asked, "-ctk", "q8_0", "-ctk-swa", "f16")
    assert "--save-base writes one pair of types, not -ctk-swa f16 as well" in result.err


def test_risks_of_types_of_windows_are_said(conformance: Path) -> None:
    """gpt-oss has attention sinks; half of its layers have a window."""
    path = conformance / "archs2" / "gpt-oss.gguf"

    def warned(**types: str) -> bool:
        with LLM(path, n_ctx=64, device="cpu", progress=False, **types) as llm:
            return any("attention sinks" in line for line in llm.warnings)

    assert not warned()
    assert warned(cache_type_v_swa="q8_0")
    assert warned(cache_type_k="q8_0", cache_type_k_swa="f16")


def test_the_benchmark_says_types_that_no_column_has(program: Program, path: Path) -> None:
    asked = ("bench", "-m", path, "-p", "8", "-n", "0", "-r", "1", "-dev", "reference")
    assert "all with -ctk-swa q8_0\n" in program(*asked, "-ctk-swa", "q8_0").err
    assert "all with" not in program(*asked).err
