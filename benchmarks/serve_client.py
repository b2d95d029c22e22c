"""Requests to a server, and when each of their tokens came: for `serve.py`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stream:
    """One answer.

    Attributes:
        began: when it was asked for, by `time.perf_counter`.
        times: when each piece came.
        n_cached, n_read: tokens of the prompt that were known, and that were evaluated.
        text: of the answer.
    """

    began: float
    times: list[float] = field(default_factory=list)
    n_cached: int = 0
    n_read: int = 0
    text: str = ""

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class Client:
    """Asks a server on this machine.

    Args:
        port: where it listens.
    """

    def __init__(self, port: int) -> None:
        self.port = port

    async def _connected(
        self, method: str, path: str, body: Any = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
        """The answer up to its body: where that can be read, and the status."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        data = b"" if body is None else json.dumps(body).encode()
        writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
            + data
        )
        head = await reader.readuntil(b"\r\n\r\n")
        return reader, writer, int(head.split(b" ", 2)[1])

    async def get(self, path: str) -> tuple[int, float]:
        """The status of a path, and the seconds that it took."""
        began = time.perf_counter()
        reader, writer, status = await self._connected("GET", path)
        await reader.read()
        writer.close()
        return status, time.perf_counter() - began

    async def complete(
        self,
        ids: Sequence[int],
        n: int,
        *,
        reads: int | None = None,
        into: Stream | None = None,
        **fields: Any,
    ) -> Stream:
        """An answer of `n` tokens to a prompt.

        Args:
            reads: go away after that many pieces of the answer.
            into: what grows, and is returned.
        """
        body = {
            "prompt": list(ids),
            "n_predict": n,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": True,
            **fields,
        }
        stream = into or Stream(time.perf_counter())
        reader, writer, status = await self._connected("POST", "/completion", body)
        try:
            while line := await reader.readline():
                if status != 200:
                    raise RuntimeError((line + await reader.read()).decode())
                if line.startswith(b"data: "):
                    self._take(stream, json.loads(line[6:]))
                    if reads is not None and len(stream.times) >= reads:
                        break
        finally:
            writer.close()
        return stream

    @staticmethod
    def _take(stream: Stream, event: dict[str, Any]) -> None:
        if "error" in event:
            raise RuntimeError(event["error"])
        if event.get("content"):
            stream.times.append(time.perf_counter())
            stream.text += event["content"]
        if timings := event.get("timings"):
            stream.n_read = timings["prompt_n"]
            stream.n_cached = timings.get("cache_n", 0)
