"""`/v1/chat/completions`: OpenAI's chat API, with llama-server's fields added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localkv.engine.logprobs import as_openai
from localkv.server.answer import AnswerReader, Answers, Delta, Reasoning
from localkv.server.chat_request import ChatBody, begun
from localkv.server.dialects.openai_answer import FINISH_REASONS, OpenAIAnswer
from localkv.server.front import Front
from localkv.server.json_answer import JsonLists, event, event_stream, json_answer
from localkv.server.json_body import received, takes
from localkv.server.usage import native_timings, prompt_progress
from localkv.server.wire import Ended, Event, Piece, Reading
from localkv.tool_calls.source import CallArguments, CallBegun, Content


class Choice:
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
        self.choices = [Choice(reader) for reader in answers.readers]

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
        return self.object(
            "chat.completion",
            choices=choices,
            **self.totals,
            **self._verbose,
        )

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
