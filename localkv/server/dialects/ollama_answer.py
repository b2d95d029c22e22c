"""ollama's `/api/chat` and `/api/generate`: answers as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from localkv.engine.logprobs import TokenLogprob, as_openai
from localkv.server.answer import AnswerReader, Answers, Delta, Reasoning
from localkv.server.chat_request import begun
from localkv.server.dialects.ollama_request import (
    ChatRequest,
    GenerateRequest,
    Options,
    chat_body,
    check,
    response_format,
)
from localkv.server.dialects.openai_completions import submits
from localkv.server.failures import RequestError
from localkv.server.front import Front
from localkv.server.json_answer import JsonLists, json_answer, json_response, to_json
from localkv.server.json_body import received, takes
from localkv.server.prompts import text_prompts
from localkv.server.request_fields import grammar_of, stop_strings
from localkv.server.wire import Ended, Event, Piece
from localkv.tool_calls.source import CallArguments, CallBegun, Content

NANO = 1_000_000_000


def now() -> str:
    """The time, as Go writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer:
    """One answer.

    Args:
        answers: it comes from here.
        body: the request.
        began: when it came, by `time.perf_counter`.
    """

    def __init__(self, answers: Answers, body: ChatRequest | GenerateRequest, began: float) -> None:
        self.answers, self._body = answers, body
        self._is_chat = isinstance(body, ChatRequest)
        self._began = began
        self._calls = list[tuple[str, list[str]]]()

    async def whole(self) -> dict[str, Any]:
        """The answer, once it is there.

        Raises:
            RequestError: it failed.
        """
        text, thinking = list[str](), list[str]()
        lists, final = JsonLists(), dict[str, Any]()
        async for _, one, deltas in self.answers.news():
            more, thought = self._take(deltas)
            text.append(more)
            thinking.append(thought)
            if isinstance(one, Piece):
                lists.add({"logprobs": as_openai(one.logprobs)["content"]})
            elif isinstance(one, Ended):
                calls, unread = self._called()
                text.append(unread)
                said = self._said("".join(text), "".join(thinking), calls, ())
                final = {**self._head(), **said, **lists.whole(), **self._end(one)}
        return final

    async def lines(self) -> AsyncIterator[bytes]:
        """The answer as it comes."""
        try:
            async for _, one, deltas in self.answers.news():
                for item in self._items(one, deltas):
                    yield to_json({**self._head(), **item}) + b"\n"
        except RequestError as error:
            yield to_json({"error": str(error)}) + b"\n"
        finally:
            self.answers.close()

    def _items(self, one: Event, deltas: list[Delta]) -> list[dict[str, Any]]:
        """What an event adds to the stream."""
        text, thinking = self._take(deltas)
        logprobs = one.logprobs if isinstance(one, Piece) else ()
        calls = list[dict[str, Any]]()
        if isinstance(one, Ended):
            calls, unread = self._called()
            text += unread
        items = list[dict[str, Any]]()
        if text or thinking or calls or logprobs:
            items.append({**self._said(text, thinking, calls, logprobs), "done": False})
        if isinstance(one, Ended):
            items.append({**self._said("", "", [], ()), **self._end(one)})
        return items

    def _take(self, deltas: list[Delta]) -> tuple[str, str]:
        """The text and the reasoning that deltas add; calls are noted."""
        text = thinking = ""
        for delta in deltas:
            if isinstance(delta, Content):
                text += delta.text
            elif isinstance(delta, Reasoning):
                thinking += delta.text
            elif isinstance(delta, CallBegun):
                self._calls.append((delta.name, []))
            else:
                assert isinstance(delta, CallArguments)
                self._calls[delta.index][1].append(delta.text)
        return text, thinking

    def _called(self) -> tuple[list[dict[str, Any]], str]:
        """The calls of tools, and the text of those whose arguments are no object."""
        calls, unread = [], ""
        for name, pieces in self._calls:
            text = "".join(pieces)
            try:
                arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
                calls.append({"function": {"name": name, "arguments": arguments}})
            except msgspec.MsgspecError:
                unread += json.dumps({"name": name, "arguments": text}, ensure_ascii=False)
        return calls, unread

    def _head(self) -> dict[str, Any]:
        return {"model": self._body.model, "created_at": now()}

    def _said(
        self,
        text: str,
        thinking: str,
        calls: list[dict[str, Any]],
        logprobs: tuple[TokenLogprob, ...],
    ) -> dict[str, Any]:
        others: dict[str, Any] = {"thinking": thinking} if thinking else {}
        said: dict[str, Any]
        if self._is_chat:
            if calls:
                others["tool_calls"] = calls
            said = {"message": {"role": "assistant", "content": text, **others}}
        else:
            said = {"response": text, **others}
        if logprobs:
            said["logprobs"] = as_openai(logprobs)["content"]
        return said

    def _end(self, end: Ended) -> dict[str, Any]:
        usage, timings = end.usage, end.timings
        return {
            "done": True,
            "done_reason": "length" if end.finish_reason == "length" else "stop",
            "total_duration": int(NANO * (time.perf_counter() - self._began)),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(NANO * timings.prompt_seconds),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(NANO * timings.decode_seconds),
        }


async def _raw(front: Front, body: GenerateRequest, options: Options) -> Answers:
    """Begin to continue a prompt as it is.

    Raises:
        RequestError: it can't be continued.
    """
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    requests = await submits(
        front,
        options,
        await text_prompts(front, body.prompt or ""),
        1,
        max_tokens=front.n_predict(options.num_predict, body.max_tokens),
        stop=stop_strings(options.stop),
        logprobs=logprobs,
        grammar=await front.apart(grammar_of, {"response_format": response_format(body)}),
    )
    texts = await front.begin_all(requests)
    return Answers(texts, [AnswerReader(keeps_reasoning=True)])


async def _answered(
    front: Front, request: Request, body: ChatRequest | GenerateRequest
) -> Response:
    began, options = time.perf_counter(), await check(front, body)
    asks = body.messages if isinstance(body, ChatRequest) else body.prompt
    if not asks:
        empty: dict[str, Any] = {"response": ""}
        if isinstance(body, ChatRequest):
            empty = {"message": {"role": "assistant", "content": ""}}
        head = {"model": body.model, "created_at": now()}
        return json_response({**head, **empty, "done": True, "done_reason": "load"})
    if isinstance(body, GenerateRequest) and (body.raw or (await front.model()).template is None):
        answers = await _raw(front, body, options)
    else:
        answers = await begun(front, await front.for_body(chat_body, body, options))
    answer = OllamaAnswer(answers, body, began)
    if body.stream is False:
        return await json_answer(request, answer.whole(), answers.texts)
    return StreamingResponse(answer.lines(), media_type="application/x-ndjson")


@takes(ChatRequest)
async def chat(front: Front, request: Request) -> Response:
    """POST /api/chat."""
    return await _answered(front, request, await received(front, request, ChatRequest))


@takes(GenerateRequest)
async def generate(front: Front, request: Request) -> Response:
    """POST /api/generate."""
    return await _answered(front, request, await received(front, request, GenerateRequest))
