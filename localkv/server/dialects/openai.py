"""OpenAI's API: `/v1/chat/completions`, `/v1/completions` and `/v1/models`.

Requests may have llama-server's fields, too. `OpenAIAnswer` is what answers of both kinds share:
their head, and their stream. `/v1/responses` is in `openai_responses`.
"""

from __future__ import annotations

import codecs
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localkv.engine.logprobs import LEAST, TokenLogprob, as_openai
from localkv.engine_process.texts import Ended, Event, Piece, Reading
from localkv.server import limits
from localkv.server.answer import (
    AnswerReader,
    Answers,
    Delta,
    Reasoning,
    RunningTimings,
    native_timings,
    openai_usage,
    prompt_progress,
)
from localkv.server.chat_request import ChatBody, StreamOptions, begun
from localkv.server.failures import RequestError, unsupported
from localkv.server.front import Front
from localkv.server.json_answer import (
    DONE,
    JsonLists,
    event,
    event_stream,
    json_answer,
    json_response,
)
from localkv.server.json_body import received, takes
from localkv.server.models import Models, ServedModel
from localkv.server.prompts import GivenPrompts, infill_prompt, text_prompts
from localkv.server.request_fields import RequestFields, text_fields
from localkv.tool_calls.source import CallArguments, CallBegun, Content

FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop"}


class OpenAIAnswer(ABC):
    """Answers to one request, whole or in chunks.

    Args:
        answers: as they come.
        model: the name of the model that answers.
        options: of the stream.
        n: answers to each prompt, which come next to each other.
    """

    id_prefix: str
    chunk_kind: str

    def __init__(self, answers: Answers, model: str, options: StreamOptions | None, n: int) -> None:
        self.answers = answers
        self._n = n
        self._has_usage = options is not None and bool(options.include_usage)
        self.timings = [RunningTimings() for _ in answers.readers]
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_urlsafe(18)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": "localkv",
        }

    def object(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An object of the API with the fields that all of this answer have."""
        return {**self._head, "object": kind, **fields}

    @property
    def totals(self) -> dict[str, Any]:
        """The objects `usage` of all answers, and `timings` of the first."""
        ends = self.answers.ended
        usage = openai_usage(ends, self._n)
        return {"usage": usage, "timings": native_timings(ends[0])}

    @abstractmethod
    def opening_chunks(self) -> Iterable[bytes]:
        """What comes before the model writes."""

    @abstractmethod
    def chunks_of(self, index: int, one: Event, deltas: list[Delta]) -> list[bytes]:
        """What an event adds to the stream."""

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answers as server-sent events."""
        try:
            for chunk in self.opening_chunks():
                yield chunk
            async for index, one, deltas in self.answers.news():
                self.timings[index].note(one)
                for chunk in self.chunks_of(index, one, deltas):
                    yield chunk
            if self._has_usage:
                yield event(self.object(self.chunk_kind, choices=[], **self.totals))
            yield DONE
        except RequestError as error:
            yield event({"error": error.fields})
        finally:
            self.answers.close()


class ChatChoice:
    """One answer while it comes.

    Args:
        reader: splits its text into reasoning, calls of tools, and the rest.
    """

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self.lists = JsonLists()
        self.calls = list[dict[str, Any]]()
        self.end: Ended | None = None

    def note(self, event: Event) -> None:
        """Keep what the whole answer needs."""
        if isinstance(event, Ended):
            self.end = event

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


class ChatAnswer(OpenAIAnswer):
    """Answers to one request.

    Args:
        body: the request.
        answers: as many as were asked for.
        model: the name of the model that answers.
    """

    id_prefix, chunk_kind = "chatcmpl", "chat.completion.chunk"

    def __init__(self, body: ChatBody, answers: Answers, model: str) -> None:
        super().__init__(answers, model, body.stream_options, n=len(answers.readers))
        self.body = body
        self.choices = [ChatChoice(reader) for reader in answers.readers]

    async def whole(self) -> dict[str, Any]:
        """All answers, once they are there.

        Raises:
            RequestError: one of them failed.
        """
        async for index, one, deltas in self.answers.news():
            choice = self.choices[index]
            choice.note(one)
            choice.take(deltas)
            if isinstance(one, Piece) and one.logprobs:
                choice.lists.add(as_openai(one.logprobs))
        choices = [
            {
                "index": index,
                "message": choice.message,
                "logprobs": choice.lists.whole("content") if self.body.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self.choices)
        ]
        return self.object("chat.completion", choices=choices, **self.totals, **self._verbose)

    @property
    def _verbose(self) -> dict[str, Any]:
        """What the model has read, where somebody wants to see that."""
        return {"__verbose": {"prompt": self.answers.prompt}} if self.body.verbose else {}

    def opening_chunks(self) -> list[bytes]:
        """Each answer's role."""
        opening = {"role": "assistant", "content": None}
        return [self._chunk(index, opening) for index in range(len(self.choices))]

    def chunks_of(self, index: int, one: Event, deltas: list[Delta]) -> list[bytes]:
        """What an event adds to the stream."""
        choice = self.choices[index]
        choice.note(one)
        if isinstance(one, Reading):
            if not self.body.return_progress:
                return []
            return [
                self._chunk(index, {}, prompt_progress=prompt_progress(one, self.timings[index]))
            ]
        objects = choice.take(deltas)
        logprobs = None
        if isinstance(one, Piece) and self.body.logprobs and one.logprobs:
            logprobs = as_openai(one.logprobs)
            objects = objects or [{}]
        chunks = list[bytes]()
        told: dict[str, Any] = {}
        if self.body.timings_per_token:
            told["timings"] = self.timings[index].now()
        for delta in objects:
            chunks.append(self._chunk(index, delta, logprobs=logprobs, **told))
            logprobs = None
        if isinstance(one, Ended):
            timings = native_timings(one)
            chunks.append(
                self._chunk(index, {}, choice.finish_reason, timings=timings, **self._verbose)
            )
        return chunks

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
        return event(self.object(self.chunk_kind, choices=[choice], **fields))


@takes(ChatBody)
async def chat_completions(front: Front, request: Request) -> Response:
    """POST /v1/chat/completions."""
    body = await received(front, request, ChatBody)
    answer = ChatAnswer(body, await begun(front, body), front.settings.model_name)
    if body.stream:
        return event_stream(answer.chunks())
    return await json_answer(request, answer.whole(), answer.answers.texts)


class CompletionBody(RequestFields, kw_only=True):
    """The fields that mean something here; others are ignored."""

    prompt: GivenPrompts
    stream_options: StreamOptions | None = None
    best_of: limits.Choices | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: limits.Logprobs | None = None


class TextChoice:
    """One text while it comes.

    Args:
        echoed: the text of the prompt, if it belongs to the answer.
    """

    def __init__(self, echoed: str) -> None:
        self.text = echoed
        self.lists = JsonLists()
        self.end: Ended | None = None
        self._offset = len(echoed)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, one: Event, deltas: list[Delta]) -> str:
        """Note an event; the text that it adds."""
        added = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        self.text += added
        if isinstance(one, Ended):
            self.end = one
        return added

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why it ended."""
        assert self.end is not None
        return FINISH_REASONS[self.end.finish_reason]

    def logprobs_of(self, tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        """The object `logprobs` of the next tokens, as this API has it, and as the chat API."""
        offsets = list[int]()
        for one in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(one.bytes))
        return {
            "tokens": [one.token for one in tokens],
            "token_logprobs": [max(LEAST, one.logprob) for one in tokens],
            "top_logprobs": [
                {top.token: max(LEAST, top.logprob) for top in one.top_logprobs} for one in tokens
            ],
            "text_offset": offsets,
            **as_openai(tokens),
        }


class CompletionAnswer(OpenAIAnswer):
    """Texts for one request.

    Args:
        body: the request.
        answers: the texts, as many as were asked for to each prompt.
        echoed: what each begins with.
        model: the name of the model that answers.
    """

    id_prefix, chunk_kind = "cmpl", "text_completion"

    def __init__(
        self, body: CompletionBody, answers: Answers, echoed: list[str], model: str
    ) -> None:
        super().__init__(answers, model, body.stream_options, body.n or 1)
        self.body = body
        self.choices = [TextChoice(text) for text in echoed]

    async def whole(self) -> dict[str, Any]:
        """All texts, once they are there.

        Raises:
            RequestError: one of them failed.
        """
        async for index, one, deltas in self.answers.news():
            choice = self.choices[index]
            choice.take(one, deltas)
            if isinstance(one, Piece) and one.logprobs:
                choice.lists.add(choice.logprobs_of(one.logprobs))
        choices = [
            self._choice(index, choice.text, choice.lists.whole(), choice.finish_reason)
            for index, choice in enumerate(self.choices)
        ]
        return self.object(self.chunk_kind, choices=choices, **self.totals)

    def opening_chunks(self) -> Iterable[bytes]:
        """The prompts, if they belong to the answers."""
        for index, choice in enumerate(self.choices):
            if choice.text:
                yield self._chunk(index, choice.text)

    def chunks_of(self, index: int, one: Event, deltas: list[Delta]) -> list[bytes]:
        """What an event adds to the stream."""
        if isinstance(one, Reading):
            if not self.body.return_progress:
                return []
            return [
                self._chunk(index, "", prompt_progress=prompt_progress(one, self.timings[index]))
            ]
        choice = self.choices[index]
        text = choice.take(one, deltas)
        logprobs = one.logprobs if isinstance(one, Piece) else ()
        told: dict[str, Any] = {}
        if self.body.timings_per_token:
            told["timings"] = self.timings[index].now()
        chunks = [self._chunk(index, text, logprobs, **told)] if text or logprobs else []
        if isinstance(one, Ended):
            reason, timings = choice.finish_reason, native_timings(one)
            chunks.append(self._chunk(index, "", finish_reason=reason, timings=timings))
        return chunks

    def _choice(
        self, index: int, text: str, logprobs: Mapping[str, Any], finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs or None,
            "finish_reason": finish_reason,
        }

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: str | None = None,
        **fields: Any,
    ) -> bytes:
        told = self.choices[index].logprobs_of(logprobs) if logprobs else {}
        choice = self._choice(index, text, told, finish_reason)
        return event(self.object(self.chunk_kind, choices=[choice], **fields))


def _check(body: CompletionBody) -> None:
    """Refuse what makes no sense, or is not there.

    Raises:
        RequestError: says what.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "ask for n texts, with logprobs, and choose among them")
    if body.suffix and not isinstance(body.prompt, str):
        raise RequestError(400, "suffix is for one prompt, a text", "send one request for each")
    if body.echo and body.logprobs is not None:
        raise unsupported("logprobs of a prompt (echo)", "leave echo out for those of the answer")


@takes(CompletionBody)
async def completions(front: Front, request: Request) -> Response:
    """POST /v1/completions."""
    body = await received(front, request, CompletionBody)
    _check(body)
    most = front.n_predict(body.max_tokens, body.max_completion_tokens, body.n_predict)
    n = body.n or 1
    if body.suffix and isinstance(body.prompt, str):
        prompts = [await infill_prompt(front, body.prompt, body.suffix, max_tokens=most)]
    else:
        prompts = await text_prompts(front, body.prompt)
    requests = await front.submits(
        body, prompts, n, max_tokens=most, logprobs=body.logprobs, **await text_fields(front, body)
    )
    texts = await front.begin_all(requests)
    answers = Answers(texts, [AnswerReader(keeps_reasoning=True) for _ in requests])
    echoed = [prompt.text if body.echo else "" for prompt in prompts for _ in range(n)]
    answer = CompletionAnswer(body, answers, echoed, front.settings.model_name)
    if body.stream:
        return event_stream(answer.chunks())
    return await json_answer(request, answer.whole(), texts)


async def health(models: Models, request: Request) -> Response:
    """GET /health: 200 once the model is loaded; 503 before, and while the engine stands still."""
    models.check_health()
    return json_response({"status": "ok"})


async def models(models: Models, request: Request) -> Response:
    """GET /v1/models: the models, loaded or not."""
    return json_response({"object": "list", "data": [described(one) for one in models]})


async def model(models: Models, request: Request) -> Response:
    """GET /v1/models/NAME: a model, by one of its names.

    Raises:
        RequestError: 404, there is none of this name.
    """
    return json_response(described(models.listed(request.path_params["name"])))


def described(model: ServedModel) -> dict[str, Any]:
    """A model as an element of the list."""
    facts, settings = model.supervisor.facts, model.settings
    described: dict[str, Any] = {
        "id": settings.model_name,
        "aliases": list(settings.names),
        "tags": list(settings.tags),
        "object": "model",
        "created": model.front.started,
        "owned_by": "localkv",
        "status": model.status,
    }
    if facts is not None:
        engine = facts.engine
        described["meta"] = {
            "n_vocab": facts.n_vocab,
            "n_ctx": engine.n_ctx,
            "n_ctx_train": engine.n_ctx_train,
            "n_embd": facts.n_embd,
            "n_params": facts.n_params,
            "size": engine.weight_bytes,
            "cache_type_k": engine.type_k,
            "cache_type_v": engine.type_v,
            "cache_tokens": facts.cache_tokens,
            "cache_bytes": facts.cache_bytes,
        }
    return described
