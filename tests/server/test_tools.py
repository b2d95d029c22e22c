"""Calls of tools over HTTP: each API's own shape of the same calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from support.server import RunningServer

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 120}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}}
HERMES = """\
{%- if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
For each call: <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>{% endif %}
{%- for message in messages %}{{ '<|' + message.role + '|>' }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose template writes calls as Hermes does."""
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(HERMES)
    running = RunningServer("-a", "tales", "--chat-template-file", str(template)).wait()
    yield running
    assert running.stop() == 0


def check(arguments: dict[str, Any]) -> None:
    assert arguments["city"] in ("Bern", "Rome")
    assert arguments["days"] in (1, 2, 3)


def test_a_call_that_is_required(tooled: RunningServer):
    with openai.OpenAI(base_url=f"{tooled.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="tales", tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **ASK
        )
    choice = answer.choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert not choice.message.content
    check(json.loads(call.function.arguments))


def test_a_streamed_call_comes_in_pieces(tooled: RunningServer):
    with openai.OpenAI(base_url=f"{tooled.url}/v1", api_key="none") as client:
        named = {"type": "function", "function": {"name": "weather"}}
        chunks = list(
            client.chat.completions.create(
                model="tales",
                tools=[TOOL],
                tool_choice=named,
                parallel_tool_calls=False,
                stream=True,
                **ASK,
            )
        )
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].id
    assert deltas[0].function.name == "weather"
    assert len(deltas) > 2
    check(json.loads("".join(delta.function.arguments for delta in deltas)))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_same_as_messages(tooled: RunningServer):
    tool = {"name": "weather", "description": "Weather.", "input_schema": PARAMETERS}
    with anthropic.Anthropic(base_url=tooled.url, api_key="none") as claude:
        options = {
            "model": "tales",
            "tools": [tool],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            **ASK,
        }
        message = claude.messages.create(**options)
        with claude.messages.stream(**options) as stream:
            streamed = stream.get_final_message()
    for one in (message, streamed):
        assert one.stop_reason == "tool_use"
        assert one.content[-1].name == "weather"
        check(one.content[-1].input)


def test_the_same_as_responses(tooled: RunningServer):
    with openai.OpenAI(base_url=f"{tooled.url}/v1", api_key="none") as client:
        response = client.responses.create(
            model="tales",
            input="Weather?",
            max_output_tokens=120,
            tools=[{"type": "function", **FUNCTION}],
            tool_choice="required",
            parallel_tool_calls=False,
        )
    (call,) = [item for item in response.output if item.type == "function_call"]
    check(json.loads(call.arguments))


def test_a_result_goes_back_to_the_model(tooled: RunningServer):
    call = {"id": None, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": None, "content": "rain"},
    ]
    status, _ = tooled.post(
        "/v1/chat/completions", {**ASK, "messages": messages, "tools": [TOOL], "max_tokens": 4}
    )
    assert status == 200


def test_none_is_called_where_none_may_be(tooled: RunningServer):
    body = {**ASK, "tools": [TOOL], "tool_choice": "none", "max_tokens": 8}
    status, answer = tooled.post("/v1/chat/completions", body)
    assert status == 200
    assert "tool_calls" not in answer["choices"][0]["message"]


def test_a_schema_beside_tools_is_for_what_is_no_call(tooled: RunningServer):
    fields = {"tools": [TOOL], "response_format": FORMAT}
    for seed in range(3):
        status, answer = tooled.post("/v1/chat/completions", {**ASK, **fields, "seed": seed})
        assert status == 200
        message = answer["choices"][0]["message"]
        assert message.get("tool_calls") or json.loads(message["content"]) in (1, 2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "weather"),
        ({"tools": [{"type": "function", "function": {}}]}, "no name"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "strict": True,
                            "parameters": {"not": {"type": "null"}},
                        },
                    }
                ],
                "tool_choice": "required",
            },
            "not",
        ),
    ],
)
def test_what_can_not_be_called_is_refused(
    tooled: RunningServer, fields: dict[str, Any], says: str
):
    status, answer = tooled.post("/v1/chat/completions", {**ASK, "tools": [TOOL], **fields})
    assert status == 400
    assert says in answer["error"]["message"]


def test_a_strict_tool_without_a_grammar_is_refused_in_each_dialect(tooled: RunningServer):
    odd = {"properties": {"n": {"not": {"const": 3}}}}
    for path, asked, tool in (
        ("/v1/messages", ASK, {"name": "odd", "input_schema": odd}),
        ("/v1/responses", {"input": "a"}, {"type": "function", "name": "odd", "parameters": odd}),
    ):
        body = {"model": "tales", **asked, "tools": [{**tool, "strict": True}]}
        status, answer = tooled.post(path, body)
        assert status == 400
        assert "the tool 'odd' can't be used: no grammar for not" in answer["error"]["message"]


def test_an_odd_tool_is_named_and_others_keep_to_their_schemas(tooled: RunningServer):
    odd = {"name": "odd", "parameters": {"properties": {"n": {"not": {"const": 3}}}}}
    tools = [TOOL, {"type": "function", "function": odd}]
    choice = {"type": "function", "function": {"name": "weather"}}
    with openai.OpenAI(base_url=f"{tooled.url}/v1", api_key="none") as client:
        options = {"model": "tales", "tools": tools, "parallel_tool_calls": False, **ASK}
        raw = client.chat.completions.with_raw_response.create(tool_choice="required", **options)
        assert (
            "the tool 'odd' can't be used: no grammar for not" in raw.headers["x-localkv-warning"]
        )
        answer = client.chat.completions.create(tool_choice=choice, **options)
    (call,) = answer.choices[0].message.tool_calls
    check(json.loads(call.function.arguments))


CUTS: dict[str, Any] = {
    "/v1/chat/completions": ("max_tokens", {"tools": [TOOL], "tool_choice": "required"}),
    "/v1/messages": (
        "max_tokens",
        {
            "tools": [{"name": "weather", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "any"},
        },
    ),
    "/v1/responses": (
        "max_output_tokens",
        {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    ),
}


def texts_in(path: str, answer: dict[str, Any]) -> list[str]:
    if path == "/v1/chat/completions":
        return [answer["choices"][0]["message"]["content"] or ""]
    if path == "/v1/messages":
        return [part["text"] for part in answer["content"] if part["type"] == "text"]
    parts = [part for one in answer["output"] for part in one.get("content", ())]
    return [part["text"] for part in parts]


@pytest.mark.parametrize("path", CUTS)
def test_a_call_that_is_cut_is_no_text(tooled: RunningServer, path: str):
    most, fields = CUTS[path]
    asked = {"input": "Weather?"} if path == "/v1/responses" else {"messages": ASK["messages"]}
    for n in (*range(1, 30, 3), 40):
        status, answer = tooled.post(path, {"model": "tales", **asked, **fields, most: n})
        assert status == 200
        assert "".join(texts_in(path, answer)) == "", (n, answer)


def test_a_streamed_call_that_is_cut_is_no_text(tooled: RunningServer):
    with openai.OpenAI(base_url=f"{tooled.url}/v1", api_key="none") as client:
        for n in (2, 8, 14, 20):
            options = {"model": "tales", "tools": [TOOL], **ASK, "max_tokens": n}
            chunks = client.chat.completions.create(tool_choice="required", stream=True, **options)
            assert not any(one.choices and one.choices[0].delta.content for one in chunks)
