"""Real models predict what llama.cpp predicts, and packed caches change as little as they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localkv import LLM
from localkv.config import preset_pairs
from localkv.simd.cpu_features import HAS_BYTE_DOTS
from support.paths import DATA, ROOT
from support.program import Program
from support.real_models import FILES

HANDBOOK = DATA / "handbook.txt"


def perplexity(program: Program, model: Path, *options: str) -> dict[str, Any]:
    """What `localkv perplexity` finds on the handbook with one cache."""
    report = program("perplexity", "-m", model, "-f", HANDBOOK, "--json", *options)
    (found,) = json.loads(report.out)["results"]
    return found


def kld(program: Program, model: Path, *options: str) -> float:
    """The mean divergence from an f16 cache, over two chunks of 2,048 tokens."""
    length = ("-c", "2048", "--chunks", "2")
    found = perplexity(program, model, *length, "--kl-divergence", *options)
    return found["divergence"]["kld"]["value"]


@pytest.fixture
def model(name: str, folder: Path) -> Path:
    return folder / FILES[name]


def test_perplexity_is_llama_cpps(
    program: Program, model: Path, by_llama_cpp: dict[str, Any]
) -> None:
    found = perplexity(program, model, "-c", "512")["ppl"]["value"]
    assert found == pytest.approx(by_llama_cpp["perplexity"], rel=2e-3)


def stated(page: str, table: str, smollm2: str, gemma3: str) -> dict[str, dict[str, float]]:
    """The divergences in a table of a page, by the row's name and by model.

    Args:
        table: what the marks around it say.
        smollm2, gemma3: the heads of the models' columns.
    """
    text = (ROOT / "docs" / page).read_text()
    within = text.partition(f"<!-- {table} -->")[2].partition(f"<!-- end of {table} -->")[0]
    lines = [line for line in within.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    columns = {"smollm2": head.index(smollm2), "gemma3": head.index(gemma3)}
    return {row[0]: {name: float(row[i]) for name, i in columns.items()} for row in rows}


@pytest.mark.parametrize(
    "pair", ["q8_0/q8_0", "q4_1c/q4_0", *map("/".join, preset_pairs())], ids=str
)
def test_packed_caches_cost_what_the_documentation_says(
    program: Program, model: Path, name: str, by_llama_cpp: dict[str, Any], pair: str
) -> None:
    """Presets are among them. None costs more than in llama.cpp."""
    type_k, type_v = pair.split("/")
    found = kld(program, model, "-ctk", type_k, "-ctv", type_v)
    costs = stated("cache-costs.md", "real cost table", "KLD: SmolLM2 135M", "KLD: Gemma 3 270M")
    assert found == pytest.approx(costs["/".join(dict.fromkeys((type_k, type_v)))][name], rel=0.1)
    if pair in by_llama_cpp["divergence"]:
        assert found < 1.05 * by_llama_cpp["divergence"][pair]


@pytest.mark.skipif(not HAS_BYTE_DOTS, reason="this CPU has no products of bytes")
def test_8_bit_activations_cost_what_the_documentation_says(
    program: Program, model: Path, name: str, tmp_path: Path
) -> None:
    """From float32 ones, both through an f16 cache; a q8_0 cache alone costs less."""
    length, base = ("-c", "2048", "--chunks", "2"), str(tmp_path / "exact.npz")
    exact = (*length, "--activations", "exact")
    perplexity(program, model, *exact, "--save-base", base)
    rounded = perplexity(program, model, *length, "--base", base)["divergence"]["kld"]["value"]
    costs = stated("quality.md", "activations", "SmolLM2", "Gemma 3")["as published"]
    assert rounded == pytest.approx(costs[name], rel=0.1)
    packed = perplexity(program, model, *exact, "--base", base, "-ctk", "q8_0", "-ctv", "q8_0")[
        "divergence"
    ]["kld"]["value"]
    alone = stated("quality.md", "exact", "SmolLM2", "Gemma 3")["q8_0/q8_0"]
    assert packed == pytest.approx(alone[name], rel=0.1)
    assert packed < rounded


def test_greedy_answers_are_llama_cpps(llm: LLM, by_llama_cpp: dict[str, Any]) -> None:
    """Each token that llama.cpp chose is the most likely one here, or as likely but for the noise
    of 8-bit activations."""
    n_same = n_all = 0
    for prompt, answer in by_llama_cpp["answers"].items():
        asked, both = llm.tokenize(prompt), llm.tokenize(prompt + answer)
        assert both[: len(asked)] == asked
        logits = llm.logits(both[:-1])[len(asked) - 1 :]
        chosen = both[len(asked) :]
        behind = logits.max(1) - logits[np.arange(len(chosen)), chosen]
        assert behind.max() < 0.5, prompt
        n_same, n_all = n_same + int((behind == 0).sum()), n_all + len(chosen)
    assert n_same >= 0.95 * n_all > 100


def test_texts_of_ten_scripts_have_llama_cpps_tokens(
    llm: LLM, by_llama_cpp: dict[str, Any]
) -> None:
    assert len(by_llama_cpp["tokens"]) == 10
    for text, ids in by_llama_cpp["tokens"].values():
        assert llm.tokenize(text) == ids
        plain = llm.tokenize(text, add_special=False)
        assert llm.detokenize(plain) == text
