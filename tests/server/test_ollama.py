"""ollama's API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localkv.server.answer import AnswerReader, Answers
from localkv.server.dialects.ollama import ChatRequest, OllamaAnswer, Options, chat_body
from localkv.tool_calls.source import CallArguments, CallBegun
from support.server import RunningServer

MESSAGES = [{"role": "user", "content": "Tell me of a dog."}]
OPTIONS = {"temperature": 0, "num_predict": 12, "seed": 1}


def _lines(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = server.post(path, {"model": "tales", "options": OPTIONS, **body})[1]
    return [json.loads(line) for line in text.splitlines()] if isinstance(text, str) else [text]


def test_a_chat_whole_and_in_lines(server: RunningServer):
    lines = _lines(server, "/api/chat", {"messages": MESSAGES})
    whole = _lines(server, "/api/chat", {"messages": MESSAGES, "stream": False})[0]
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert whole["done_reason"] in ("stop", "length")
    assert lines[-1]["eval_count"] == whole["eval_count"] > 0
    assert whole["prompt_eval_count"] > 0
    parts = whole["prompt_eval_duration"] + whole["eval_duration"]
    assert whole["total_duration"] >= parts > 0
    other = {"model": "tales", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    same = server.post("/v1/chat/completions", other)[1]["choices"][0]["message"]["content"]
    assert whole["message"]["content"] == same


def test_a_prompt_with_and_without_the_template(server: RunningServer):
    prompt = "Once upon a time"
    raw = {"prompt": prompt, "raw": True, "logprobs": True, "top_logprobs": 2}
    lines = _lines(server, "/api/generate", raw)
    plain = server.post("/completion", {"prompt": prompt, "n_predict": 12, "temperature": 0})[1]
    assert "".join(line["response"] for line in lines) == plain["content"]
    assert sum(len(line.get("logprobs", ())) for line in lines) == 12
    asked = {"prompt": MESSAGES[0]["content"], "stream": False}
    chat = _lines(server, "/api/chat", {"messages": MESSAGES, "stream": False})[0]
    assert _lines(server, "/api/generate", asked)[0]["response"] == chat["message"]["content"]


def test_an_answer_keeps_to_a_schema(server: RunningServer):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    body = {
        "messages": MESSAGES,
        "stream": False,
        "format": {**schema, "additionalProperties": False},
    }
    answer = _lines(server, "/api/chat", {**body, "options": {"temperature": 0}})[0]
    assert json.loads(answer["message"]["content"])["a"] in (1, 2)


def test_the_model_is_described(server: RunningServer):
    listed = server.get("/api/tags")[1]["models"][0]
    assert listed["name"] == "tales:latest"
    assert listed["details"]["quantization_level"] == "Q8_0"
    shown = server.post("/api/show", {"model": "tales:latest"})[1]
    assert "completion" in shown["capabilities"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 2048
    assert not any(key.startswith("tokenizer") for key in shown["model_info"])
    running = server.get("/api/ps")[1]["models"][0]
    assert running["context_length"] == 2048
    assert running["digest"] == listed["digest"]
    assert server.get("/api/version")[1]["version"][0].isdigit()


def test_what_there_is_not_is_told_as_text(server: RunningServer):
    status, answer = server.post("/api/push", {"model": "tales"})
    assert (status, type(answer["error"])) == (501, str)
    assert server.post("/api/nothing", {}) == (404, {"error": "POST /api/nothing: no such path"})


def test_a_request_for_nothing_asks_for_the_model(server: RunningServer):
    for path in ("/api/chat", "/api/generate"):
        assert server.post(path, {"model": "tales"})[1]["done_reason"] == "load"


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"options": {"top_p": "x"}}, 400, "options.top_p must be a number from 0 to 1, not"),
        ({"format": "xml"}, 400, "format"),
        ({"think": True}, 400, "does not think"),
        ({"messages": [{**MESSAGES[0], "images": ["x"]}]}, 501, "images"),
    ],
)
def test_what_is_refused(server: RunningServer, fields: dict, status: int, message: str):
    got, answer = server.post("/api/chat", {"model": "tales", "messages": MESSAGES, **fields})
    assert got == status
    assert message in answer["error"]


def test_calls_of_tools_have_objects(server: RunningServer):
    answer = OllamaAnswer(Answers(None, [AnswerReader()]), ChatRequest(model="tales"), 0.0)
    deltas = [
        CallBegun(0, "a", "add"),
        CallArguments(0, '{"x": '),
        CallArguments(0, "1}"),
        CallBegun(1, "b", "cut"),
        CallArguments(1, '{"y": '),
    ]
    assert answer._take(deltas) == ("", "")
    calls, unread = answer._called()
    assert calls == [{"function": {"name": "add", "arguments": {"x": 1}}}]
    assert "cut" in unread


def test_earlier_calls_and_thoughts_have_the_names_of_templates():
    call = {"function": {"name": "add", "arguments": {"x": 1}}}
    body = ChatRequest(
        model="tales",
        messages=[
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_name": "add"},
        ],
    )
    first, second = chat_body(body, Options()).messages
    assert first["reasoning_content"] == "hm"
    assert first["tool_calls"] == [{"type": "function", **call}]
    assert second == {"role": "tool", "content": "2", "name": "add"}


@pytest.mark.parametrize("calls", [5, True, {"a": 1}, [5], [["x"]], "x"], ids=str)
def test_calls_of_another_kind_are_refused_by_name(server: RunningServer, calls: Any):
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    body = {"model": "tales", "stream": False, "messages": [{"role": "user", "content": "a"}, said]}
    status, answer = server.post("/api/chat", body)
    assert (status, "tool_calls" in answer["error"]) == (400, True), answer
