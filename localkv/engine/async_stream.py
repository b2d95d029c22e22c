"""A stream of text for asyncio: its pieces come from a thread, the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import TracebackType
from typing import Self

from localkv.engine.stream import Completion, TextStream


class AsyncTextStream(AsyncIterator[str]):
    """Pieces of text as they are generated.

    A task that is cancelled while it waits for a piece ends the generation, too; so does leaving
    an `async with` block. Between two pieces nothing runs for a stream alone.

    Args:
        stream: makes the pieces.
        cancel: ends it; what it was made with.
    """

    def __init__(self, stream: TextStream, cancel: Event) -> None:
        self.stream = stream
        self._cancel = cancel
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="localkv-stream")
        self._has_ended = False

    async def __anext__(self) -> str:
        if self._has_ended:
            raise StopAsyncIteration
        loop = asyncio.get_running_loop()
        try:
            piece = await loop.run_in_executor(self._thread, next, self.stream, None)
        except asyncio.CancelledError:
            self._cancel.set()
            raise
        if piece is None:
            self._end()
            raise StopAsyncIteration
        return piece

    def _end(self) -> None:
        self._has_ended = True
        self._thread.shutdown(wait=False)

    async def completion(self) -> Completion:
        """Everything about the generation; reads the rest of it first."""
        async for _ in self:
            pass
        return await asyncio.to_thread(lambda: self.stream.completion)  # audits may come with it

    async def aclose(self) -> None:
        """End it, with "cancelled" unless it has ended."""
        self._cancel.set()
        self._end()
        await asyncio.to_thread(self.stream.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
