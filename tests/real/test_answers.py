"""What a real model is held to, keeps and finds out: schemas, calls, states, budgets, audits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localkv import LLM
from support.real_models import FILES

SEEDS = range(8)
PERSON = {
    "type": "object",
    "properties": {"name": {"const": "Anna"}, "age": {"type": "integer", "enum": [34, 43]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_answers_follow_a_schema(smollm2: LLM) -> None:
    for seed in SEEDS:
        stream = smollm2.chat(
            "Anna is 34 years old. Write her name and age as JSON.",
            schema=PERSON,
            temperature=0.8,
            seed=seed,
            max_tokens=64,
        )
        assert json.loads("".join(stream)) == {"name": "Anna", "age": 34}
        assert stream.completion.finish_reason == "stop"


@pytest.mark.filterwarnings("ignore:the chat template does not read tools")
def test_calls_are_calls(smollm2: LLM) -> None:
    system = f"You call tools. The tools are: {json.dumps(WEATHER)}"
    question = "What is the weather in Paris?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    for seed in SEEDS:
        stream = smollm2.chat(
            messages,
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0.8,
            seed=seed,
            max_tokens=64,
        )
        list(stream)
        (call,) = stream.completion.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})


def test_a_saved_text_goes_on_with_the_same_answer(
    name: str, folder: Path, handbook: str, tmp_path: Path
) -> None:
    types = {"cache_type_k": "q8_0", "cache_type_v": "q4_0"}
    with LLM(folder / FILES[name], n_ctx=1024, progress=False, **types) as llm:
        prompt = llm.tokenize(handbook)[:700]
        whole = llm.complete(prompt, max_tokens=24, temperature=0).text
        llm.save_state(tmp_path / "text.state", prompt)
    with LLM(folder / FILES[name], n_ctx=1024, progress=False, **types) as llm:
        assert llm.load_state(tmp_path / "text.state")[: len(prompt)] == prompt
        stream = llm.stream(prompt, max_tokens=24, temperature=0)
        assert "".join(stream) == whole
        assert stream.stats.n_reused > 600


def test_a_budget_holds_a_longer_text(folder: Path, handbook: str) -> None:
    file = folder / FILES["smollm2"]
    with LLM(file, n_ctx=2048, kv_budget=16 << 20, progress=False) as llm:
        prompt = llm.tokenize(handbook)[:1500]  # 33 MiB in f16
        stream = llm.stream(prompt, max_tokens=24, temperature=0)
        assert "".join(stream).strip()
        assert stream.stats.n_generated == 24


def test_an_audit_finds_what_few_bits_change(folder: Path, handbook: str) -> None:
    found = {}
    for types in (("q8_0", "q8_0"), ("kv2_0", "kv2_0")):
        with LLM(
            folder / FILES["smollm2"],
            n_ctx=1024,
            cache_type_k=types[0],
            cache_type_v=types[1],
            progress=False,
        ) as llm:
            prompt = llm.tokenize(handbook)[:800]
            options = {"max_tokens": 32, "temperature": 0, "audit": "exact"}
            found[types[0]] = llm.complete(prompt, **options).audit
    assert found["q8_0"].kld_mean < 0.02 < found["kv2_0"].kld_mean
