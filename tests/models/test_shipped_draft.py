"""The small model that drafts for the one that ships."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localkv import LLM
from localkv.errors import ModelClosedError
from localkv.kernels.backend import Guessing
from support.paths import MODELS
from support.program import Program

MODEL, DRAFT = MODELS / "tales-4M-Q8_0.gguf", MODELS / "tales-draft-Q8_0.gguf"


def test_it_drafts_exactly() -> None:
    """Stories are the same by bytes, and it guesses most of what they say."""
    assert DRAFT.stat().st_size <= 1 << 20
    llm = LLM(MODEL, draft_model=DRAFT, cache_type_k_draft="q8_0", n_ctx=512)
    prompt = llm.chat_prompt([{"role": "user", "content": "Tell me a story about a fox."}])
    assert llm.engine.draft is not None
    pace = llm.engine.draft.pace
    pace.may_draft = lambda *_: True  # whatever the machine is busy with
    pace.worthy = lambda found, *_: [len(guesses) for guesses in found]
    pace.guessing = lambda most, *_, **__: Guessing(min(most, 4), 1024, 0.0, (), (1.0,), (0.0,) * 4)
    for temperature in (0.0, 0.8):
        texts = {}
        for spec in ("none", "draft"):
            llm.engine.reset()
            done = llm.complete(prompt, max_tokens=100, temperature=temperature, seed=5, spec=spec)
            texts[spec] = done.text
        assert texts["none"] == texts["draft"]
        assert done.usage.accepted_tokens > done.usage.drafted_tokens / 2 > 5
    draft = llm.draft
    assert draft is not None
    assert llm.memory.draft is not None
    shares = "weights", "cache_k", "cache_v", "scratch"
    for name in shares:
        assert getattr(llm.memory.draft, name) == getattr(draft.memory, name)
    llm.close()
    with pytest.raises(ModelClosedError):
        draft.complete("x")


def test_the_program_counts_it(program: Program) -> None:
    """In `plan`, in the line about memory and in --stats."""
    planned = program("plan", MODEL, "-md", DRAFT, "-ctkd", "q8_0", "-c", 512, "--json")
    alone = program("plan", MODEL, "-c", 512, "--json")
    assert planned.code == 0, planned.err
    found, other = json.loads(planned.out), json.loads(alone.out)
    more = [
        pair["total"] - before["total"]
        for pair, before in zip(found["pairs"], other["pairs"], strict=True)
    ]
    assert set(more) == {found["draft"]["total"]}
    assert found["draft"]["cache_k"] < found["draft"]["cache_v"]
    flags = ("-m", MODEL, "-md", DRAFT, "-ctkd", "q8_0", "-c", 512, "-n", 8, "--stats", "-p", "One")
    result = program("complete", *flags)
    assert result.code == 0, result.err
    assert "; draft tales-draft: weights" in result.err_lines[0]
    assert "K q8_0, V f16" in result.err_lines[0].rsplit("draft", 1)[1]
    assert any(line.startswith("speculation:") for line in result.err_lines)
    assert any(
        line.startswith("memory:") and "; draft weights" in line for line in result.err_lines
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--spec", "draft"), "--spec draft needs a model that drafts"),
        (("-md", DRAFT, "--spec", "ngram"), "-md names a model that drafts, but --spec is ngram"),
        (("-md", "none.gguf"), "none.gguf"),
    ],
)
def test_mistakes(program: Program, flags: Any, said: str) -> None:
    result = program("complete", "-m", MODEL, "-p", "x", *flags)
    assert result.code != 0
    assert said in result.err_lines[0]
    assert len(result.err_lines) <= 2
