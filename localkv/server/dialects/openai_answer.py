"""What answers in OpenAI's two older APIs have in common: their head, and their stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Any

from localkv.server.answer import Answers, Delta
from localkv.server.chat_request import StreamOptions
from localkv.server.failures import RequestError
from localkv.server.json_answer import DONE, event
from localkv.server.usage import RunningTimings, native_timings, openai_usage
from localkv.server.wire import Event

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
