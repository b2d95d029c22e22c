"""Needles: where they are planted, and what the command finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localkv import LLM
from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.quality.needle import COUNT, SHARES, plant, recall
from support.paths import DATA, MODELS
from support.program import Program

F16 = MODELS / "tales-4M-F16.gguf"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(F16, n_ctx=256)


@pytest.fixture(scope="module")
def text() -> str:
    return json.loads((DATA / "llama_cpp_perplexity.json").read_text())["text"]


def encode(llm: LLM, text: str) -> list[int]:
    return llm.tokenize(text, add_special=False)


def test_they_fill_the_context_at_their_distances(llm: LLM, text: str) -> None:
    planted = plant(lambda part: encode(llm, part), encode(llm, text), 256, bos_id=1)
    assert [len(needles) for needles in planted] == [COUNT] * len(SHARES)
    for share, needles in zip(SHARES, planted, strict=True):
        for needle in needles:
            assert len(needle.prompt) + len(needle.answer) == 256
            assert needle.prompt[0] == 1
            assert needle.distance == pytest.approx(share * 256, abs=60)
            number = llm.detokenize(needle.answer).strip()
            whole = llm.detokenize(needle.prompt)
            assert number.isdigit()
            assert whole.count(f"is {number}.") == 1
            assert f"is {number}." not in llm.detokenize(needle.prompt[-needle.distance :])
    again = plant(lambda part: encode(llm, part), encode(llm, text), 256, bos_id=1)
    assert again == planted


def test_what_is_too_short_is_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match="the text has 3 tokens"):
        plant(lambda part: encode(llm, part), [5, 6, 7], 256)
    with pytest.raises(UsageError, match="no room for a needle"):
        plant(lambda part: encode(llm, part), [5] * 100, 32)


def test_a_worse_cache_recalls_less_surely(llm: LLM, text: str) -> None:
    needles = plant(lambda part: encode(llm, part), encode(llm, text), 256, bos_id=1)[0]
    good, bad = (
        recall(llm.engine.model, CacheConfig(name, name, n_ctx=256, kv_sink=0), needles)
        for name in ("f16", "kv2_0")
    )
    assert good.count == bad.count == COUNT
    assert good.right > COUNT // 2
    assert bad.log_p < good.log_p <= 0


def test_the_command(program: Program, text: str, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(text)
    arguments = ("perplexity", "-m", F16, "-f", file, "-c", "256", "--needle")
    lines = program(*arguments, "-ctk", "q4_0", "-ctv", "q4_0").out.splitlines()
    assert lines[0].split() == ["K/V", "tokens", "back", "found", "ln", "p"]
    assert [line.split()[0] for line in lines[1:]] == ["f16/f16"] * 3 + ["q4_0/q4_0"] * 3
    found = json.loads(program(*arguments, "--json").out)
    assert [one["type_k"] for one in found["needles"]] == ["f16"] * 3
    assert {one["count"] for one in found["needles"]} == {COUNT}
    refused = program(*arguments, "--kl-divergence")
    assert refused.code == 1 or refused.code == 2
    assert "without --kl-divergence" in refused.err
