"""Filling in the middle over HTTP: llama-server's `/infill`, and `suffix` of other APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import RunningServer
from support.tiny_model import FIM, write_tiny_model

PREFIX, SUFFIX = "Once upon a time there", "near the river."
EXTRA = [{"filename": "fox.txt", "text": "The fox said hello."}, {"text": "It was a good day."}]
BODY = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 4, "temperature": 0}
EDITOR = {
    "n_indent": 4,
    "t_max_predict_ms": 500,
    "t_max_prompt_ms": 500,
    "samplers": ["top_k", "top_p", "infill"],
    "top_k": 40,
    "top_p": 0.9,
    "cache_prompt": True,
    "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
}
"""What llama.vim and llama.vscode send."""


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a model with tokens for it."""
    path: Path = write_tiny_model(tmp_path_factory.mktemp("fim") / "fim.gguf", control=FIM)
    running = RunningServer("-a", "coder", "-c", "4096", model=path).wait()
    yield running
    assert running.stop() == 0


def test_a_gap_with_other_files(coder: RunningServer) -> None:
    status, answer = coder.post("/infill", {**BODY, "input_extra": EXTRA, "prompt": " was"})
    assert status == 200
    files = "<|file_sep|>fox.txt\n The fox said hello.<|file_sep|>tmp\n It was a good day."
    around = f"<s><|fim_prefix|>{PREFIX}  was<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    expected = f"<|repo_name|>myproject\n{files}<|file_sep|>filename\n{around}"
    assert answer["prompt"] == expected
    assert answer["tokens_predicted"] <= 4


def test_a_stream(coder: RunningServer) -> None:
    whole = coder.post("/infill", BODY)[1]
    text = coder.post("/infill", {**BODY, "stream": True})[1]
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]


def test_a_further_keystroke_costs_its_tokens(coder: RunningServer) -> None:
    body = {**BODY, "input_extra": EXTRA, "input_prefix": "A day. " + PREFIX}
    coder.post("/infill", body)
    timings = coder.post("/infill", {**body, "prompt": " was"})[1]["timings"]
    tokens = coder.post("/tokenize", {"content": f" was<|fim_suffix|>{SUFFIX}<|fim_middle|>"})[1]
    assert timings["prompt_n"] <= len(tokens["tokens"]) + 2
    assert timings["cache_n"] > 20


def test_what_editors_send(coder: RunningServer) -> None:
    asked = {**BODY, **EDITOR}
    status, answer = coder.post("/infill", asked)
    assert status == 200
    assert set(answer) == {*EDITOR["response_fields"]}
    warming = {**asked, "n_predict": 0, "samplers": [], "response_fields": [""]}
    assert coder.post("/infill", warming) == (200, {})


def test_a_line_that_is_not_indented_ends_a_text(coder: RunningServer) -> None:
    """A grammar makes the model write two lines, of which the second is not indented enough."""
    lines = {**BODY, "n_predict": 40, "grammar": 'root ::= "a\\n  b\\n c"'}
    whole = coder.post("/infill", lines)[1]
    assert (whole["content"], whole["stop_type"]) == ("a\n  b\n c", "eos")
    for fields, text in (({"n_indent": 2}, "a\n  b\n "), ({"n_indent": 4}, "a\n  ")):
        answer = coder.post("/infill", {**lines, **fields})[1]
        assert (answer["content"], answer["stop_type"]) == (text, "limit")
    late = coder.post("/infill", {**lines, "t_max_predict_ms": 0.001})[1]
    assert (late["content"], late["stop_type"]) == ("a\n", "limit")


def test_the_suffix_of_other_apis(coder: RunningServer) -> None:
    native = coder.post("/infill", BODY)[1]
    fields = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 4, "temperature": 0}
    openai = coder.post("/v1/completions", fields)[1]
    assert openai["choices"][0]["text"] == native["content"]
    assert openai["usage"]["prompt_tokens"] == native["tokens_evaluated"]
    options = {"num_predict": 4, "temperature": 0}
    body = {"model": "coder", "prompt": PREFIX, "suffix": SUFFIX, "options": options}
    ollama = coder.post("/api/generate", {**body, "stream": False})[1]
    assert ollama["response"] == native["content"]
    assert ollama["prompt_eval_count"] == native["tokens_evaluated"]


def test_it_says_that_it_can(coder: RunningServer, server: RunningServer) -> None:
    assert "insert" in coder.post("/api/show", {"model": "coder"})[1]["capabilities"]
    assert "insert" not in server.post("/api/show", {"model": "tales"})[1]["capabilities"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_extra": [{}]}, "text"),
        ({"input_extra": [{"filename": "ok"}]}, "text"),
        ({"input_extra": [{"filename": 1, "text": "abc"}]}, "filename"),
        ({"input_extra": {"text": "abc"}}, "input_extra"),
        ({"prompt": 1}, "prompt"),
        ({"input_prefix": None}, "input_prefix"),
    ],
)
def test_what_is_refused(coder: RunningServer, fields: dict, message: str) -> None:
    status, answer = coder.post("/infill", {**BODY, **fields})
    assert status == 400
    assert message in answer["error"]["message"]


def test_a_suffix_for_several_prompts(coder: RunningServer) -> None:
    status, answer = coder.post("/v1/completions", {"prompt": ["a", "b"], "suffix": "c"})
    assert (status, "one prompt" in answer["error"]["message"]) == (400, True)


def test_a_model_without_tokens_for_it(server: RunningServer) -> None:
    status, answer = server.post("/infill", BODY)
    assert status == 501
    assert "no prefix and no suffix and no middle token" in answer["error"]["message"]
