"""`/v1/messages`: Anthropic's API, which Claude Code and the package `anthropic` speak."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localkv.engine_process.texts import Ended
from localkv.server import limits
from localkv.server.answer import Answers, Part, PartEvent, Parts
from localkv.server.chat_request import ChatBody, Thinking, begun, rendered
from localkv.server.failures import RequestError, unsupported
from localkv.server.front import Front
from localkv.server.json_answer import event, event_stream, json_answer, json_response
from localkv.server.json_body import received, takes
from localkv.server.request_record import warn

BILLING = "x-anthropic-billing-header"
"""How a block begins that Claude Code puts first, with another value in each request: it says
nothing to a model, and no prompt would begin like an earlier one."""
_OF_OTHER_TOOLS = re.compile(r"\w{1,40}_tool_(use|result)")
"""Blocks of tools that ran on Anthropic's servers, such as `server_tool_use`."""


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: limits.Name | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: limits.Effort | None = None
    format: limits.Object | None = None


class Tool(msgspec.Struct, kw_only=True):
    name: limits.Name | None = None
    description: str | None = None
    input_schema: limits.Object | None = None
    type: limits.Word | None = None
    strict: bool | None = None


class Message(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | limits.Blocks


class CountBody(msgspec.Struct, kw_only=True):
    """What a prompt is made of."""

    messages: Annotated[list[Message], limits.MANY]
    model: limits.Name | None = None
    system: str | limits.Blocks | None = None
    tools: Annotated[list[Tool], limits.TOOLS] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: limits.Object | None = None


class MessagesBody(CountBody, kw_only=True):
    """The fields that mean something here; others are ignored."""

    max_tokens: limits.SomeTokens
    stop_sequences: limits.Stops | None = None
    stream: bool | None = None
    temperature: limits.Temperature | None = None
    top_p: limits.TopP | None = None
    top_k: limits.TopK | None = None
    seed: limits.Seed | None = None


def chat_body(body: CountBody) -> ChatBody:
    """Translate a request to OpenAI's chat API.

    Raises:
        RequestError: it has a part that is not supported.
    """
    system = [{"role": "system", "content": text}] if (text := _system(body.system)) else []
    messages = [*system, *(one for message in body.messages for one in _messages(message))]
    is_begun = bool(body.messages) and body.messages[-1].role == "assistant"
    chat = ChatBody(
        messages=messages,
        model=body.model,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None,
        continue_final_message=is_begun or None,
        response_format=_format(body),
        thinking=body.thinking,
        reasoning_effort=body.output_config.effort if body.output_config else None,
    )
    if (choice := body.tool_choice) is not None:
        names: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        named = {"type": "function", "function": {"name": choice.name}}
        chat.tool_choice = names.get(choice.type, named)
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if isinstance(body, MessagesBody):
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.seed = body.seed
    return chat


def _format(body: CountBody) -> dict[str, Any] | None:
    """`response_format` of the chat API, from `output_config.format` or its older name.

    Raises:
        RequestError: the two differ, or there is no JSON schema.
    """
    configured = body.output_config.format if body.output_config else None
    if configured and body.output_format and configured != body.output_format:
        raise RequestError(400, "output_config.format and output_format differ: give one of them")
    given = configured or body.output_format
    if not given:
        return None
    name = "output_config.format" if configured else "output_format"
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise RequestError(
            400, f"{name} is no JSON schema", 'use {"type": "json_schema", "schema": {...}}'
        )
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}


def _system(system: str | list[dict[str, Any]] | None) -> str:
    texts = [system] if isinstance(system, str) else [_text(block) for block in system or ()]
    return "\n".join(text for text in texts if text and not text.startswith(BILLING))


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    """A tool as the chat API has it; a tool that Anthropic's servers run, or whose schema they
    know, is no function."""
    if tool.input_schema is None:
        if tool.type in (None, "custom"):
            raise RequestError(400, f"{where} has no input_schema", extra={"param": "tools"})
        return {"type": tool.type, "name": tool.name}
    if tool.name is None:
        raise RequestError(400, f"{where} has no name", extra={"param": "tools"})
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
        **({"strict": True} if tool.strict else {}),
    }
    return {"type": "function", "function": function}


def _messages(message: Message) -> list[dict[str, Any]]:
    """A message as those that templates know: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, calls, thoughts = [], list[str](), [], list[str]()
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result":
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": _result(block.get("content")),
                }
            )
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif isinstance(kind, str) and _OF_OTHER_TOOLS.fullmatch(kind):
            warn(f"blocks of type {kind} are left out: only functions can be called here")
        elif kind != "redacted_thinking":
            texts.append(_text(block))
    one: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
    if calls:
        one["tool_calls"] = calls
    if thoughts:
        one["reasoning_content"] = "".join(thoughts)
    is_empty = results and not (texts or calls or thoughts)
    return [*results, *([] if is_empty else [one])]


def _call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
    return {"id": block.get("id"), "type": "function", "function": function}


def _result(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(_text(block) for block in content)
    return content or ""


def _text(block: Any) -> str:
    """The text of a block: of text, of a document or a result of a search that is text, or the name
    of a tool that a search has found.

    Raises:
        RequestError: it is another one.
    """
    if isinstance(block, dict) and block.get("type") == "text":
        text = block.get("text")
        if isinstance(text, str):
            return text
        raise RequestError(400, "a block of type text has no text")
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise RequestError(400, f"{block!r:.60} is not a content block")
    match block:
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            parts = [block.get("title"), block.get("context"), text]
        case {"type": "search_result", "content": [*texts]}:
            given = [one.get("text") for one in texts if isinstance(one, dict)]
            parts = [block.get("title"), block.get("source"), *given]
        case {"type": "tool_reference", "tool_name": str(name)}:
            parts = [name]
        case _:
            parts = []
    if parts:
        return "\n".join(part for part in parts if isinstance(part, str) and part)
    raise unsupported(f"a content block of type {kind!r:.60}", "this model reads text")


class MessageAnswer:
    """The answer to one request.

    Args:
        answers: has one.
        model: the name of the model that answers.
    """

    def __init__(self, answers: Answers, model: str) -> None:
        self.answers = answers
        self.parts = Parts()
        self._head = {
            "id": f"msg_{secrets.token_urlsafe(18)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    async def whole(self) -> dict[str, Any]:
        """The message, once it is complete.

        Raises:
            RequestError: it can't be completed.
        """
        end = await self.parts.whole(self.answers)
        content = [_block(part, part.text) for part in self.parts.all]
        return {**self._head, "content": content, **self._reason(end), "usage": _usage(end)}

    def _reason(self, end: Ended) -> dict[str, Any]:
        """Why it ended."""
        if end.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if end.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
        calls = any(part.kind == "call" for part in self.parts.all)
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}

    async def events(self) -> AsyncIterator[bytes]:
        """The message as server-sent events."""
        # what of it was in the cache is known at the end
        usage = {"input_tokens": self.answers.n_prompt, "output_tokens": 0}
        try:
            begun_message: dict[str, Any] = {
                **self._head,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": usage,
            }
            yield _event("message_start", message=begun_message)
            async for _, _, deltas in self.answers.news():
                for one in _rendered(self.parts.push(deltas)):
                    yield one
            for one in _rendered(self.parts.end()):
                yield one
            (end,) = self.answers.ended
            yield _event("message_delta", delta=self._reason(end), usage=_usage(end))
            yield _event("message_stop")
        except RequestError as error:
            yield event(error.anthropic_fields, "error")
        finally:
            self.answers.close()


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _rendered(events: Iterable[PartEvent]) -> list[bytes]:
    """Render events of parts as events of content blocks."""
    return [one for part in events for one in _block_events(part)]


def _block_events(now: PartEvent) -> list[bytes]:
    part, index = now.part, now.part.index
    if now.what == "begun":
        return [_event("content_block_start", index=index, content_block=_block(part, ""))]
    if now.what == "grown":
        delta = {
            "reasoning": {"type": "thinking_delta", "thinking": now.added},
            "content": {"type": "text_delta", "text": now.added},
            "call": {"type": "input_json_delta", "partial_json": now.added},
        }[part.kind]
        return [_event("content_block_delta", index=index, delta=delta)]
    done = _event("content_block_stop", index=index)
    if part.kind == "reasoning":
        signature = {"type": "signature_delta", "signature": ""}
        return [_event("content_block_delta", index=index, delta=signature), done]
    return [done]


def _block(part: Part, text: str) -> dict[str, Any]:
    """A content block."""
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if part.kind == "content":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": _arguments(text)}


def _arguments(text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return {}


def _usage(end: Ended) -> dict[str, int]:
    usage = end.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


@takes(MessagesBody)
async def messages(front: Front, request: Request) -> Response:
    """POST /v1/messages."""
    body = await received(front, request, MessagesBody)
    answer = MessageAnswer(
        await begun(front, await front.for_body(chat_body, body)),
        body.model or front.settings.model_name,
    )
    if body.stream:
        return event_stream(answer.events())
    return await json_answer(request, answer.whole(), answer.answers.texts)


@takes(CountBody)
async def count_tokens(front: Front, request: Request) -> Response:
    """POST /v1/messages/count_tokens: the prompt is rendered, and nothing computed."""
    body = await received(front, request, CountBody)
    prompt = await rendered(front, await front.for_body(chat_body, body))
    return json_response({"input_tokens": len(prompt.ids)})
