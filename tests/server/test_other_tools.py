"""Tools that are no functions, in each dialect: left out and named, no error by themselves."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

import pytest

from localkv.server.chat_request import AskedTools, ChatBody, asked_tools
from localkv.server.dialects import anthropic as anthropic_api
from localkv.server.dialects import ollama as ollama_api
from localkv.server.dialects import openai_responses as openai
from localkv.server.failures import RequestError
from localkv.server.json_body import decoded
from localkv.server.request_record import WARNING, RequestRecord
from support.server import RunningServer

FUNCTION = {"name": "look", "description": "", "parameters": {"type": "object"}}
OTHERS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "custom", "custom": {"name": "patch"}}],
    "responses": [
        {"type": "web_search"},
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
        {"type": "namespace", "name": "mcp", "tools": []},
        {"type": "local_shell"},
        {"type": "image_generation"},
        {"type": "mcp", "server_label": "docs", "server_url": "https://docs.example"},
    ],
    "messages": [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1},
        {"type": "mcp_toolset", "mcp_server_name": "docs"},
    ],
    "ollama": [{"type": "web_search"}],
}


def body_of(dialect: str, tools: list[dict[str, Any]], choice: Any = None) -> ChatBody:
    """A request in OpenAI's words."""
    user = [{"role": "user", "content": "Hi"}]
    asked: dict[str, Any] = {"tools": tools, "messages": user}
    if choice is not None:
        asked["tool_choice"] = choice
    match dialect:
        case "chat":
            return decoded(json.dumps(asked).encode(), ChatBody)
        case "responses":
            read = decoded(json.dumps({**asked, "input": "Hi"}).encode(), openai.ResponsesBody)
            return openai.chat_body(read)
        case "messages":
            kind = anthropic_api.MessagesBody
            asked["max_tokens"] = 1
            return anthropic_api.chat_body(decoded(json.dumps(asked).encode(), kind))
    asked["model"] = "tales"
    read = decoded(json.dumps(asked).encode(), ollama_api.ChatRequest)
    return ollama_api.chat_body(read, ollama_api.Options())


def function_of(dialect: str, name: str = "look") -> dict[str, Any]:
    """A function as a dialect has it."""
    if dialect == "messages":
        return {"name": name, "input_schema": {"type": "object"}}
    if dialect == "responses":
        return {"type": "function", **FUNCTION, "name": name}
    return {"type": "function", "function": {**FUNCTION, "name": name}}


def names(asked: AskedTools) -> tuple[list[str], list[str]]:
    """The functions that are shown, and those that may be called."""
    shown, allowed = asked.shown or [], asked.allowed
    return [t["function"]["name"] for t in shown], [t["function"]["name"] for t in allowed]


CASES = [(dialect, tool) for dialect, tools in OTHERS.items() for tool in tools]


@pytest.mark.parametrize(("dialect", "tool"), CASES)
def test_they_are_left_out_with_one_warning(
    dialect: str, tool: dict[str, Any], record: RequestRecord
) -> None:
    body = body_of(dialect, [tool, function_of(dialect), tool])
    assert names(asked_tools(body)) == (["look"], ["look"])
    assert asked_tools(body).choice == "auto"
    assert asked_tools(body_of(dialect, [tool])) == AskedTools(None, [], "auto")
    (warning,) = record.warnings
    assert warning.startswith(f"tools of type {tool['type']} are left out")


@pytest.mark.parametrize(("dialect", "tool"), [case for case in CASES if case[0] != "ollama"])
def test_one_that_has_to_be_called_is_refused(dialect: str, tool: dict[str, Any]) -> None:
    name = tool.get("name")
    named = {"type": "tool", "name": name} if dialect == "messages" else tool
    required = {"type": "any"} if dialect == "messages" else "required"
    both = [tool, function_of(dialect)]
    assert asked_tools(body_of(dialect, both, required)).choice == "required"
    for tools, choice in ((both, named), ([tool], required)):
        if choice is named and dialect == "messages" and not name:
            continue
        with pytest.raises(RequestError, match=f"tools of type {tool['type']} can't be") as error:
            asked_tools(body_of(dialect, tools, choice))
        assert error.value.status == 400


def test_none_of_them_may_be_called(record: RequestRecord) -> None:
    body = body_of("chat", [*OTHERS["chat"], function_of("chat")], "none")
    assert asked_tools(body) == AskedTools(None, [], "none")
    assert record.warnings == ()


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_the_tools_that_are_allowed(dialect: str, mode: str, record: RequestRecord) -> None:
    tools = [function_of(dialect), function_of(dialect, "go"), *OTHERS[dialect]]
    allowed = {"mode": mode, "tools": [function_of(dialect, "go"), OTHERS[dialect][0]]}
    wrapped = {"allowed_tools": allowed} if dialect == "chat" else allowed
    asked = asked_tools(body_of(dialect, tools, {"type": "allowed_tools", **wrapped}))
    assert (names(asked), asked.choice) == ((["look", "go"], ["go"]), mode)
    allowed["tools"] = [function_of(dialect, "run")]
    with pytest.raises(RequestError, match="allows 'run', which is none of the tools"):
        asked_tools(body_of(dialect, tools, {"type": "allowed_tools", **wrapped}))
    allowed["mode"] = "any"
    with pytest.raises(RequestError, match="wants a mode, auto or required"):
        asked_tools(body_of(dialect, tools, {"type": "allowed_tools", **wrapped}))


def test_what_other_servers_tools_did_is_left_out_of_histories(record: RequestRecord) -> None:
    items = [
        {"type": "web_search_call", "id": "a", "status": "completed", "action": {}},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
    ]
    call, result = openai.chat_body(openai.ResponsesBody(input=items)).messages
    assert call["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input": "x"}'}
    assert result["content"] == "done"
    blocks = [
        {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "a", "content": []},
        {"type": "text", "text": "Found."},
    ]
    message = anthropic_api.Message(role="assistant", content=blocks)
    (read,) = anthropic_api.chat_body(anthropic_api.CountBody(messages=[message])).messages
    assert read["content"] == "Found."
    assert len(record.warnings) == 3


def test_the_header_and_the_log_say_so(server: RunningServer) -> None:
    """The log has it once for all requests, also for functions that the template does not show."""
    body = {"input": "Hi", "max_output_tokens": 1, "tools": OTHERS["responses"][:2]}
    body["tools"] = [*body["tools"], function_of("responses")]
    for _ in range(2):
        headers = {"content-type": "application/json"}
        asked = Request(f"{server.url}/v1/responses", json.dumps(body).encode(), headers)
        with urlopen(asked, timeout=60) as answer:
            warning = answer.headers[WARNING]
        assert "tools of type custom, web_search are left out" in warning
        assert "does not read tools" in warning
    told = "".join(server.lines)
    assert told.count("tools of type custom, web_search are left out") == 1
    assert told.count("does not read tools") == 1
