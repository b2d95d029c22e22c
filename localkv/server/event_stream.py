"""Server-sent events: an answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import StreamingResponse

PING_SECONDS = 15.0
"""An idle stream says that it lives after so long."""

_encoder = msgspec.json.Encoder()
to_json = _encoder.encode
DONE = b"data: [DONE]\n\n"
"""The end of OpenAI's streams."""


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
    return StreamingResponse(
        with_pings(events),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )
