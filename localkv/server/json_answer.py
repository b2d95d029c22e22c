"""An answer as JSON: sent whole, or in events as it comes; and errors in each dialect's shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from localkv.errors import LocalKVError
from localkv.server.engine_client import Texts
from localkv.server.failures import RequestError, as_request_error
from localkv.server.request_record import CLOSED, current

to_json = msgspec.json.Encoder().encode

PING_SECONDS = 15.0
"""How long a stream may be idle before a comment says that it lives."""
EVENTS = "text/event-stream"
EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
"""The end of OpenAI's streams."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(to_json(value), status, headers, media_type="application/json")


class JsonLists:
    """Lists of an answer that is sent whole, by name; items become JSON as they come.

    JSON takes a tenth of the memory, which counts as the request's, and no time at the end.
    """

    def __init__(self) -> None:
        self._parts = dict[str, list[bytes]]()
        self._record = current.get()

    def add(self, lists: Mapping[str, Sequence[Any]]) -> None:
        """Add items to lists.

        Raises:
            RequestError: they are too large for one client.
        """
        for name, items in lists.items():
            if items:
                part = to_json(items)[1:-1]
                if self._record is not None:
                    self._record.keep(len(part))
                self._parts.setdefault(name, []).append(part)

    def whole(self, *names: str) -> dict[str, msgspec.Raw]:
        """The lists; each of these names has one, if empty."""
        parts = {**{name: list[bytes]() for name in names}, **self._parts}
        return {name: msgspec.Raw(b"[" + b",".join(part) + b"]") for name, part in parts.items()}


async def json_answer(request: Request, answer: Coroutine[Any, Any, Any], texts: Texts) -> Response:
    """The answer as JSON, unless the client goes away.

    Raises:
        RequestError: there is none.
    """
    making = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(gone(request))
    try:
        await asyncio.wait({making, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            return Response(status_code=CLOSED)
        return json_response(making.result())
    except LocalKVError as error:
        raise as_request_error(error) from error
    finally:
        for task in (making, leaving):
            task.cancel()
        texts.close()


async def gone(request: Request) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(data: Any, name: str | None = None) -> bytes:
    """One event with JSON data.

    Args:
        name: of its kind, in dialects that have such.
    """
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(data) + b"\n\n"


async def with_pings(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass events on, and send a comment after every `PING_SECONDS` without one."""
    source = aiter(events)
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(source))
            done, _ = await asyncio.wait({waiting}, timeout=PING_SECONDS)
            if not done:
                yield b": ping\n\n"
                continue
            try:
                piece = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield piece
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.wait({waiting})  # the source can be closed once it no longer runs
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


def event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    """An answer that comes in events; whoever goes away ends it."""
    return StreamingResponse(with_pings(events), media_type=EVENTS, headers=EVENT_HEADERS)


def error_answer(path: str, error: RequestError) -> Response:
    """What a client of a path is told, in its dialect's shape."""
    if path.startswith("/v1/messages"):
        return json_response(error.anthropic_fields, error.status, error.headers)
    if path.startswith("/api/"):
        return json_response({"error": str(error)}, error.status, error.headers)
    return json_response({"error": error.fields}, error.status, error.headers)


def error_piece(path: str, kind: str, error: RequestError) -> bytes | None:
    """The error that ends a begun stream, in its dialect's shape.

    Args:
        kind: the stream's content type.

    Returns:
        None if the body is no stream, so that it has no place for an error.
    """
    if kind.startswith("application/x-ndjson"):
        return to_json({"error": str(error)}) + b"\n"
    if not kind.startswith(EVENTS):
        return None
    if path.startswith("/v1/messages"):
        return event(error.anthropic_fields, "error")
    if path.endswith("/responses"):
        return event({"type": "error", "code": error.type, "message": str(error)}, "error")
    return event({"error": error.fields})
