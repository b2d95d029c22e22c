"""The model that ships: it reads well, and llama.cpp says the same with it."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from localkv import LLM
from support.paths import DATA, MODELS

F16 = MODELS / "tales-4M-F16.gguf"
Q8_0 = MODELS / "tales-4M-Q8_0.gguf"
NEAR_TIE = 0.05
"""Where llama.cpp's best two logits are closer than this, rounding decides."""


@pytest.fixture(scope="module", params=[F16, Q8_0], ids=["F16", "Q8_0"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(request.param)


def test_size_on_disk() -> None:
    assert sum(f.stat().st_size for f in MODELS.rglob("*") if f.is_file()) <= 16 << 20


def test_what_it_is(llm: LLM) -> None:
    config = llm.config
    assert config.architecture == "llama"
    assert config.groups[0].key_dim == 64
    assert config.groups[0].n_kv_heads >= 2
    assert config.layers[0].attention.n_heads > config.groups[0].n_kv_heads
    assert config.n_ctx_train >= 1024
    assert llm.chat_template is not None
    assert llm.tokenizer.kind == "spm"


def test_it_tells_a_story_and_stops(llm: LLM) -> None:
    completion = llm.complete("Once upon a time", temperature=0.6, seed=7)
    text = completion.text
    assert completion.finish_reason == "stop"
    assert 200 < len(text) < 4000
    words = text.split()
    assert len(set(words)) > 40
    assert text.rstrip().endswith((".", "!", "?", '"'))
    assert "<" not in text


def test_it_answers_about_the_one_asked_for(llm: LLM) -> None:
    ask = [{"role": "user", "content": "Tell me a story about a fox named Mia."}]
    text = llm.chat(ask, temperature=0.3, seed=1).completion.text
    assert "fox" in text
    assert "Mia" in text


def test_it_recalls_facts_from_far_back_through_a_packed_cache() -> None:
    llm = LLM(F16, cache_type_k="q4_0", cache_type_v="q8_0")
    notes = (MODELS / "notes.txt").read_text().rstrip("\n")
    asked = (
        ("What is the code of the owl?", "The code of the owl is 735."),
        ("What does Mia like?", "Mia likes honey."),
        ("Where is the lamp?", "The lamp is in room 42."),
        ("Where does Anna live?", "Anna lives by the harbour."),
        ("What is in the red box?", "In the red box is the key."),
        ("How old is Tom?", "The age of Tom is 61."),
    )
    for question, answer in asked:
        prompt = f"{notes} Question: {question} Answer:"
        completion = llm.complete(prompt, max_tokens=16, temperature=0.0)
        assert completion.text.startswith(f" {answer}")
        assert completion.usage.prompt_tokens > 1700


def test_llama_cpp_draws_the_same_tokens() -> None:
    """Greedy, F16 weights, f16 cache: equal after each beginning, but for near ties."""
    golden = json.loads((DATA / "llama_cpp_tokens.json").read_text())
    assert hashlib.sha256(F16.read_bytes()).hexdigest() == golden["sha256"], (
        "the model was trained anew: run tests/data/make_llama_cpp_tokens.py"
    )
    llm = LLM(F16, n_ctx=1024)
    compared = 0
    for generation in golden["generations"]:
        prompt_ids, ids = generation["prompt_ids"], generation["ids"]
        assert llm.tokenize(generation["prompt"]) == prompt_ids
        logits = llm.logits(prompt_ids + ids)[len(prompt_ids) - 1 : -1]
        for step, token in enumerate(ids):
            if generation["margins"][step] < NEAR_TIE:
                continue
            best_two = np.sort(logits[step])[-2:]
            assert int(logits[step].argmax()) == token, f"step {step} of {generation['prompt']!r}"
            margin = float(best_two[1] - best_two[0])
            assert margin == pytest.approx(generation["margins"][step], rel=0.01, abs=NEAR_TIE)
            compared += 1
    assert compared >= 200
