"""`/v1/chat/completions`: OpenAI's chat API, with llama-server's fields besides."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localkv.engine.logprobs import TokenLogprob, as_openai
from localkv.errors import LocalKVError
from localkv.server.answer import AnswerReader, CallArguments, CallBegun, Content, Delta, Reasoning
from localkv.server.engine_client import Texts
from localkv.server.event_stream import DONE, event, event_stream
from localkv.server.failures import RequestError, as_request_error, unsupported
from localkv.server.front import Front, opening_of
from localkv.server.json_answer import json_answer
from localkv.server.json_body import decoded
from localkv.server.sampling_fields import SamplingFields, stop_strings
from localkv.server.usage import native_timings, openai_usage
from localkv.server.wire import Ended, Piece, Reading, Submit

MOST_CHOICES = 128
FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop"}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class ChatBody(SamplingFields, kw_only=True):
    """The fields that mean something here; others are ignored."""

    messages: list[dict[str, Any]]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking_budget_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    modalities: list[str] | None = None
    functions: list[dict[str, Any]] | None = None


class Choice:
    """One answer while it comes.

    Args:
        reader: takes its text apart.
    """

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self.logprobs = list[TokenLogprob]()
        self.calls = list[dict[str, Any]]()
        self.end: Ended | None = None

    def take(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        """The objects `delta` that stand for deltas; calls are noted."""
        return [self._delta(delta) for delta in deltas]

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, Content):
            return {"content": delta.text}
        if isinstance(delta, Reasoning):
            return {"reasoning_content": delta.text}
        if isinstance(delta, CallBegun):
            function = {"name": delta.name, "arguments": ""}
            self.calls.append({"id": delta.id, "type": "function", "function": dict(function)})
            call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        assert isinstance(delta, CallArguments)
        self.calls[delta.index]["function"]["arguments"] += delta.text
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why it ended."""
        assert self.end is not None
        reason = FINISH_REASONS[self.end.finish_reason]
        return "tool_calls" if self.calls and reason == "stop" else reason

    @property
    def message(self) -> dict[str, Any]:
        """The whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": self.reader.content}
        if self.reader.reasoning:
            message["reasoning_content"] = self.reader.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
            message["content"] = self.reader.content or None
        return message


class ChatAnswer:
    """Answers to one request.

    Args:
        body: the request.
        texts: they come from here.
        choices: as many as were asked for.
        model: the name of the model that answers.
    """

    def __init__(self, body: ChatBody, texts: Texts, choices: list[Choice], model: str) -> None:
        self.body, self.texts, self.choices = body, texts, choices
        self._head = {
            "id": f"chatcmpl-{secrets.token_urlsafe(18)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": "localkv",
        }

    def _object(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {**self._head, "object": kind, **fields}

    @property
    def _ends(self) -> list[Ended]:
        return [choice.end for choice in self.choices if choice.end is not None]

    async def whole(self) -> dict[str, Any]:
        """All answers, once they are there.

        Raises:
            RequestError: one of them failed.
        """
        async for events in self.texts:
            for number, one in events:
                self._take(self.choices[number], one)
        for end in self._ends:
            if end.error:
                raise RequestError(500, end.error)
        choices = [
            {
                "index": index,
                "message": choice.message,
                "logprobs": as_openai(tuple(choice.logprobs)) if self.body.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self.choices)
        ]
        return self._object(
            "chat.completion",
            choices=choices,
            usage=openai_usage(self._ends),
            timings=native_timings(self._ends[0]),
        )

    def _take(self, choice: Choice, one: object) -> list[dict[str, Any]]:
        """Note an event; the deltas that it brings."""
        if isinstance(one, Piece):
            choice.logprobs += one.logprobs
            return choice.take(choice.reader.push(one.text))
        if isinstance(one, Ended):
            deltas = choice.take(choice.reader.end())
            choice.end = one
            return deltas
        return []

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answers as server-sent events."""
        try:
            for index in range(len(self.choices)):
                yield self._chunk(index, {"role": "assistant", "content": None})
            async for events in self.texts:
                for index, one in events:
                    for chunk in self._chunks_of(index, one):
                        yield chunk
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                usage = openai_usage(self._ends)
                yield event(self._object("chat.completion.chunk", choices=[], usage=usage))
            yield DONE
        except LocalKVError as error:
            yield event({"error": as_request_error(error).fields})
        finally:
            self.texts.close()

    def _chunks_of(self, index: int, one: object) -> list[bytes]:
        choice = self.choices[index]
        if isinstance(one, Reading):
            return [self._progress(index, one)] if self.body.return_progress else []
        deltas = self._take(choice, one)
        chunks = list[bytes]()
        if isinstance(one, Piece):
            logprobs = as_openai(one.logprobs) if self.body.logprobs else None
            if logprobs and not deltas:
                deltas = [{}]
            for delta in deltas:
                chunks.append(self._chunk(index, delta, logprobs=logprobs))
                logprobs = None
        elif isinstance(one, Ended):
            chunks += [self._chunk(index, delta) for delta in deltas]
            if one.error:
                raise RequestError(500, one.error)
            timings = native_timings(one)
            chunks.append(self._chunk(index, {}, choice.finish_reason, timings=timings))
        return chunks

    def _progress(self, index: int, now: Reading) -> bytes:
        progress = {"total": now.n_prompt, "cache": now.n_cached, "processed": now.n_held}
        return self._chunk(index, {}, prompt_progress=progress)

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        finish_reason: str | None = None,
        *,
        logprobs: dict[str, Any] | None = None,
        **fields: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason}
        if self.body.logprobs:
            choice["logprobs"] = logprobs
        return event(self._object("chat.completion.chunk", choices=[choice], **fields))


async def begun(front: Front, body: ChatBody) -> ChatAnswer:
    """Begin to answer a conversation.

    Raises:
        RequestError: it can't be answered.
    """
    front.check_model(body.model)
    _check(body)
    prompt = await front.conversation(
        body.messages,
        tools=body.tools,
        template_kwargs=_template_kwargs(body),
        enable_thinking=body.enable_thinking,
        reasoning_budget=body.thinking_budget_tokens,
        continue_final_message=bool(body.continue_final_message),
        add_generation_prompt=None if body.continue_final_message else body.add_generation_prompt,
    )
    n = body.n or 1
    logprobs = None
    if body.logprobs:
        logprobs = body.top_logprobs or 0
    submit = Submit(
        0,
        prompt.ids,
        await front.params(body),
        max_tokens=front.n_predict(body.max_completion_tokens, body.max_tokens, body.n_predict),
        stop=stop_strings(body.stop),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        chat=opening_of(prompt),
    )
    texts = await front.begin(submit, n)
    opened = prompt.reasoning.open if prompt.reasoning and not prompt.opening else ""
    keeps = body.reasoning_format == "none"
    choices = [Choice(AnswerReader(keeps_reasoning=keeps, opened=opened)) for _ in range(n)]
    return ChatAnswer(body, texts, choices, front.settings.model_name)


def _template_kwargs(body: ChatBody) -> dict[str, Any] | None:
    """Variables of the template; `reasoning_effort` is one that gpt-oss's reads."""
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    return {"reasoning_effort": body.reasoning_effort, **(body.chat_template_kwargs or {})}


def _check(body: ChatBody) -> None:
    """Refuse what makes no sense, or is not there.

    Raises:
        RequestError: says what.
    """
    if not body.messages:
        raise RequestError(400, "messages is empty", "send at least one")
    if body.n is not None and not 1 <= body.n <= MOST_CHOICES:
        raise RequestError(400, f"n must be from 1 to {MOST_CHOICES}, not {body.n}")
    if body.top_logprobs and not body.logprobs:
        raise RequestError(400, "top_logprobs needs logprobs: true")
    if body.functions:
        raise unsupported("functions", "use tools, which replaced it")
    others = set(body.modalities or ()) - {"text"}
    if others:
        raise unsupported(f"the modality {sorted(others)[0]!r}", "this model writes text")


async def chat_completions(front: Front, request: Request) -> Response:
    """POST /v1/chat/completions."""
    body = decoded(await request.body(), ChatBody)
    answer = await begun(front, body)
    if body.stream:
        return event_stream(answer.chunks())
    return await json_answer(request, answer.whole(), answer.texts)
