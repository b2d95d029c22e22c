"""Answers that keep to a schema or a grammar, over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from localkv.loader.tokenizer import load_tokenizer
from support.paths import ROOT
from support.server import RunningServer


class Pet(BaseModel, extra="forbid"):
    """What the answer is to be."""

    name: str = Field(max_length=8)
    legs: Literal[2, 4]


ASK: dict[str, Any] = {
    "model": "tales",
    "messages": [{"role": "user", "content": "A dog named Spot"}],
    "max_tokens": 200,
    "seed": 3,
}


def test_parse_gives_the_object(client: openai.OpenAI):
    message = client.chat.completions.parse(**ASK, response_format=Pet).choices[0].message
    assert isinstance(message.parsed, Pet)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "schema": Pet.model_json_schema()}},
        {"json_schema": Pet.model_json_schema()},
        {"grammar": 'root ::= "{\\"name\\": \\"" [a-z]{1,8} "\\"}"'},
    ],
    ids=["schema inside", "llama-server", "gbnf"],
)
def test_each_spelling_holds(server: RunningServer, fields: dict[str, Any]):
    _, answer = server.post("/v1/chat/completions", {**ASK, **fields})
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)


def test_a_stream_holds(client: openai.OpenAI):
    wanted = {"name": "pet", "schema": Pet.model_json_schema()}
    chunks = client.chat.completions.create(
        **ASK, response_format={"type": "json_schema", "json_schema": wanted}, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    Pet.model_validate_json(text)


def test_a_text_is_one_of_as_many_as_may_be(server: RunningServer):
    texts = [f"cat {i}" for i in range(1024)]
    status, answer = server.post("/v1/completions", {"prompt": "a", "guided_choice": texts})
    assert (status, answer["choices"][0]["text"] in texts) == (200, True)


def test_a_grammar_that_takes_too_much_is_the_fault_of_its_request(server: RunningServer):
    grammar = 'root ::= root root root | root root | "a" | ""'
    body = {"prompt": "a", "grammar": grammar, "ignore_eos": True, "max_tokens": 300}
    status, answer = server.post("/v1/completions", body)
    assert (status, "at one place" in answer["error"]["message"]) == (400, True)


def test_any_object(client: openai.OpenAI):
    answer = client.chat.completions.create(**ASK, response_format={"type": "json_object"})
    assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"response_format": {"type": "json_schema"}}, "no schema"),
        ({"json_schema": {"not": {"type": "string"}}}, "not"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "give one"),
        ({"grammar": "root ::= ("}, "grammar"),
    ],
)
def test_what_can_not_be_kept_is_refused(server: RunningServer, fields: dict[str, Any], says: str):
    status, answer = server.post("/v1/chat/completions", {**ASK, **fields})
    assert status == 400
    assert says in answer["error"]["message"]


def _chain(n: int) -> dict[str, Any]:
    defs = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(n)}
    return {"$defs": {**defs, f"d{n}": {"type": "null"}}, "$ref": "#/$defs/d0"}


CYCLE = {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}
RULES = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(2000)) + 'r2000 ::= "a"'


@pytest.mark.parametrize(
    ("schema", "says"),
    [(_chain(1200), "too deeply"), (CYCLE, "nothing satisfies it|level exceeded")],
)
def test_no_schema_ends_the_server(server: RunningServer, schema: Any, says: str):
    function = {"name": "f", "parameters": schema, "strict": True}
    tool = {"type": "function", "function": function}
    wrapped = {"type": "json_schema", "json_schema": {"schema": schema}}
    messages = {"messages": ASK["messages"], "max_tokens": 1}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {**messages, "response_format": wrapped}),
        ("/v1/chat/completions", {**messages, "tools": [tool], "tool_choice": "required"}),
        ("/completion", {"prompt": "a", "n_predict": 1, "json_schema": schema}),
        ("/api/chat", {**messages, "model": "tales", "format": schema}),
        ("/v1/responses", {"input": "a", "text": {"format": {**wrapped, "schema": schema}}}),
    ]
    for path, body in asked:
        status, answer = server.post(path, body)
        error = answer["error"]
        assert status == 400, (path, answer)
        assert re.search(says, str(error)), (path, answer)
    assert server.get("/health")[0] == 200


def test_no_grammar_ends_the_server(server: RunningServer):
    status, answer = server.post("/completion", {"prompt": "a", "n_predict": 1, "grammar": RULES})
    assert status == 400
    assert "too deeply" in answer["error"]["message"]
    assert server.get("/health")[0] == 200


THINK = """\
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"""
WANTED = {"type": "object", "properties": {"is": {"enum": [True, False]}}, "required": ["is"]}


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a model that reasons, and ends its text wherever it may."""
    template = tmp_path_factory.mktemp("template") / "think.jinja"
    template.write_text(THINK)
    ends = load_tokenizer(ROOT / "models/tales-4M-Q8_0.gguf").eog_ids
    biases = [part for token in ends for part in ("--logit-bias", f"{token}+100")]
    running = RunningServer("-a", "tales", "--chat-template-file", str(template), *biases).wait()
    yield running
    assert running.stop() == 0


FORMAT = {"type": "json_schema", "name": "x", "schema": WANTED}
SAID = {"model": "tales", "messages": [{"role": "user", "content": "Is it?"}]}
TOOL = {"name": "say", "description": "Says it.", "parameters": WANTED}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
        ),
        ("/v1/chat/completions", {"grammar": 'root ::= "{\\"is\\": true}"'}),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
        ),
        ("/v1/responses", {"input": "Is it?", "text": {"format": FORMAT}}),
        (
            "/v1/messages",
            {"tools": [{"name": "say", "input_schema": WANTED}], "tool_choice": {"type": "any"}},
        ),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": WANTED}}}),
        ("/api/chat", {"format": WANTED, "stream": False}),
    ],
    ids=["schema", "grammar", "tools", "responses", "any tool", "messages", "ollama"],
)
def test_what_must_follow_reasoning_follows(
    eager: RunningServer, path: str, fields: dict[str, Any]
):
    asked = {**SAID, "max_tokens": 200, **fields}
    if path == "/v1/responses":
        asked = {"model": "tales", **fields}
    status, answer = eager.post(path, asked)
    assert status == 200, answer
    assert re.search(r'\\*"is\\*": (true|false)', json.dumps(answer)), answer
