"""`/v1/responses`: OpenAI's newer API, which Codex speaks. Nothing is stored from call to call."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localkv.engine_process.texts import Ended, Reading
from localkv.server import limits
from localkv.server.answer import (
    Answers,
    Part,
    PartEvent,
    Parts,
    RunningTimings,
    native_timings,
    prompt_progress,
)
from localkv.server.chat_request import ChatBody, ReasoningOptions, begun, rendered
from localkv.server.failures import RequestError, unsupported
from localkv.server.front import Front
from localkv.server.json_answer import event, event_stream, json_answer, json_response
from localkv.server.json_body import NOTED, received, takes
from localkv.server.request_record import warn

_OF_OTHER_TOOLS = re.compile(r"mcp_\w{1,40}|\w{1,40}_call(_output)?")
"""Items of a history that OpenAI's servers made, such as `web_search_call`."""
LOGPROBS = "message.output_text.logprobs"
"""What `include` may ask for in vain; its other values are about tools of OpenAI's servers."""
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
"""Parts of a content that are text."""


class TextOptions(msgspec.Struct, kw_only=True):
    format: limits.Object | None = None
    verbosity: limits.Word | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The fields that mean something here; others are ignored."""

    input: str | limits.Messages | None = None
    model: limits.Name | None = None
    instructions: str | None = None
    max_output_tokens: limits.Tokens | None = None
    max_tokens: limits.Tokens | None = None
    temperature: limits.Temperature | None = None
    top_p: limits.TopP | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: limits.Name | None = None
    conversation: limits.Name | limits.Object | None = None
    background: bool | None = None
    tools: limits.Tools | None = None
    tool_choice: limits.Name | limits.Object | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: limits.Metadata | None = None
    prompt: limits.Object | None = None
    include: limits.Names | None = None
    top_logprobs: limits.Logprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: limits.Blocks | None = None
    stream_options: limits.Object | None = None
    seed: limits.Seed | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None


def chat_body(body: ResponsesBody) -> ChatBody:
    """Translate a request to the chat API.

    Raises:
        RequestError: it has a part that is not supported.
    """
    _check(body)
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _messages(body.input or ())
    return ChatBody(
        messages=messages,
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning=body.reasoning,
        response_format=_format(body.text),
    )


def _check(body: ResponsesBody) -> None:
    if body.input is None:
        raise RequestError(400, "there is no input")
    kept = {
        "prompt": body.prompt,
        "previous_response_id": body.previous_response_id,
        "conversation": body.conversation,
        "store": body.store,
    }
    for name, value in kept.items():
        if value:
            raise RequestError(
                400,
                f"{name}: this server stores no responses",
                "send the whole conversation as input, and store: false",
                extra={"param": name},
            )
    if body.background:
        raise unsupported("background", "leave it out, and read the stream")
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        raise unsupported("logprobs of a response", "ask /v1/chat/completions for them")
    if body.text is not None and body.text.verbosity:
        warn(f"verbosity has no effect: {NOTED['verbosity']}")
    if body.truncation == "auto" or body.context_management:
        name = "truncation" if body.truncation == "auto" else "context_management"
        warn(f"{name} has no effect: {NOTED['context_management']}")


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the chat API has it; those that are no functions stay as they are."""
    if tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    """`response_format` of the chat API."""
    given = text.format if text is not None else None
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}


def _messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input as messages. What the model wrote in a row is one message."""
    messages = list[dict[str, Any]]()
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            role, text = item.get("role"), _text(item.get("content"))
            if role == "assistant":
                _own(messages)["content"] += text
            else:
                messages.append({"role": role, "content": text})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary")
            _own(messages)["reasoning_content"] = _text(parts)
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments") or "{}"
            if kind == "custom_tool_call":  # another server's: its input is any text
                arguments = json.dumps({"input": item.get("input")})
            function = {"name": item.get("name"), "arguments": arguments}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _own(messages).setdefault("tool_calls", []).append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _text(item.get("output"))
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            )
        elif isinstance(kind, str) and _OF_OTHER_TOOLS.fullmatch(kind):
            warn(f"an input of type {kind} is left out: only functions can be called here")
        else:
            raise unsupported(f"an input of type {kind!r:.60}", "messages and function calls are")
    return messages


def _own(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the model is writing."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(400, f"{content!r:.60} is not a content")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            texts.append(str(part.get("refusal", "")))
        elif kind in TEXTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise unsupported(f"a content of type {kind!r:.60}", "this model reads text")
    return "".join(texts)


class ResponseAnswer:
    """The answer to one request.

    Args:
        body: the request.
        answers: has one.
        model: the name of the model that answers.
    """

    def __init__(self, body: ResponsesBody, answers: Answers, model: str) -> None:
        self.body, self.answers = body, answers
        self.parts = Parts()
        self._timings = RunningTimings()
        self._ids = list[str]()
        self._n_events = 0
        self._head = {
            "id": f"resp_{secrets.token_urlsafe(18)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
        }

    def _response(self, status: str, end: Ended | None = None, **fields: Any) -> dict[str, Any]:
        output = [self._item(part, self._ended(part)) for part in self.parts.all] if end else []
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None if end is None else _usage(end),
            **fields,
        }

    def _final(self, end: Ended) -> dict[str, Any]:
        """The whole response."""
        if end.finish_reason == "length":
            details = {"reason": "max_output_tokens"}
            return self._response("incomplete", end, incomplete_details=details)
        return self._response("completed", end)

    async def whole(self) -> dict[str, Any]:
        """The response, once it is complete.

        Raises:
            RequestError: it can't be completed.
        """
        return self._final(await self.parts.whole(self.answers))

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        body = self.body
        try:
            response = self._response("in_progress")
            yield self._event("response.created", response=response)
            yield self._event("response.in_progress", response=response)
            async for _, now, deltas in self.answers.news():
                self._timings.note(now)
                if isinstance(now, Reading) and body.return_progress:
                    progress = prompt_progress(now, self._timings)
                    yield self._event(
                        "response.in_progress", response=response, prompt_progress=progress
                    )
                for one in self._rendered(self.parts.push(deltas)):
                    yield one
            for one in self._rendered(self.parts.end()):
                yield one
            (end,) = self.answers.ended
            final = self._final(end)
            timings = {"timings": native_timings(end)} if body.timings_per_token else {}
            yield self._event(f"response.{final['status']}", response=final, **timings)
        except RequestError as error:
            problem = {"code": error.type, "message": str(error)}
            failed = self._response("failed", error=problem)
            yield self._event("response.failed", response=failed)
        finally:
            self.answers.close()

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._n_events += 1
        return event({"type": kind, "sequence_number": self._n_events - 1, **fields}, kind)

    def _rendered(self, events: Iterable[PartEvent]) -> list[bytes]:
        render = {"begun": self._begun, "grown": self._grown, "done": self._done}
        return [one for now in events for one in render[now.what](now)]

    def _begun(self, now: PartEvent) -> list[bytes]:
        part, at = now.part, {"output_index": now.part.index}
        item = self._item(part, "in_progress")
        if part.kind != "call":
            item["content"] = []
        added = self._event("response.output_item.added", item=item, **at)
        if part.kind == "call":
            return [added]
        where = {**at, "item_id": self._id(part), "content_index": 0}
        empty = _content(Part(0, part.kind))
        return [added, self._event("response.content_part.added", part=empty, **where)]

    def _grown(self, now: PartEvent) -> list[bytes]:
        part = now.part
        where: dict[str, Any] = {"output_index": part.index, "item_id": self._id(part)}
        where["delta"] = now.added
        if self.body.timings_per_token:
            where["timings"] = self._timings.now()
        if part.kind == "call":
            return [self._event("response.function_call_arguments.delta", **where)]
        kind = "reasoning" if part.kind == "reasoning" else "output"
        return [
            self._event(f"response.{kind}_text.delta", content_index=0, **where, **_logprobs(part))
        ]

    def _done(self, now: PartEvent) -> list[bytes]:
        part, at = now.part, {"output_index": now.part.index}
        where: dict[str, Any] = {**at, "item_id": self._id(part)}
        ends = list[bytes]()
        if part.kind == "call":
            fields = {"arguments": part.text, "name": part.name}
            ends.append(self._event("response.function_call_arguments.done", **fields, **where))
        else:
            kind = "reasoning" if part.kind == "reasoning" else "output"
            where["content_index"] = 0
            fields = {"text": part.text, **_logprobs(part)}
            ends.append(self._event(f"response.{kind}_text.done", **fields, **where))
            ends.append(self._event("response.content_part.done", part=_content(part), **where))
        item = self._item(part, self._ended(part))
        return [*ends, self._event("response.output_item.done", item=item, **at)]

    def _ended(self, part: Part) -> str:
        """The status of a part that does not go on."""
        is_last = part is self.parts.all[-1]
        is_cut = any(end.finish_reason == "length" for end in self.answers.ended)
        return "incomplete" if is_last and is_cut else "completed"

    def _id(self, part: Part) -> str:
        """The id of the item that a part is."""
        prefix = {"reasoning": "rs", "content": "msg", "call": "fc"}[part.kind]
        while len(self._ids) <= part.index:
            self._ids.append(f"{prefix}_{secrets.token_urlsafe(12)}")
        return self._ids[part.index]

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        """A part as an output item."""
        head = {"id": self._id(part), "status": status}
        if part.kind == "call":
            return {
                "type": "function_call",
                **head,
                "call_id": part.id,
                "name": part.name,
                "arguments": part.text,
            }
        if part.kind == "reasoning":
            return {"type": "reasoning", **head, "summary": [], "content": [_content(part)]}
        return {"type": "message", **head, "role": "assistant", "content": [_content(part)]}


def _logprobs(part: Part) -> dict[str, Any]:
    """A field that events of text must have; there are none here."""
    return {} if part.kind == "reasoning" else {"logprobs": []}


def _content(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _usage(end: Ended) -> dict[str, Any]:
    usage = end.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


@takes(ResponsesBody)
async def responses(front: Front, request: Request) -> Response:
    """POST /v1/responses."""
    body = await received(front, request, ResponsesBody)
    answers = await begun(front, await front.for_body(chat_body, body))
    answer = ResponseAnswer(body, answers, front.settings.model_name)
    if body.stream:
        return event_stream(answer.events())
    return await json_answer(request, answer.whole(), answers.texts)


@takes(ResponsesBody)
async def input_tokens(front: Front, request: Request) -> Response:
    """POST /v1/responses/input_tokens: the prompt is rendered, and nothing computed."""
    body = await received(front, request, ResponsesBody)
    prompt = await rendered(front, await front.for_body(chat_body, body))
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})
