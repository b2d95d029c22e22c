"""A connection of a client: uvicorn's, with limits on what it costs while it says nothing useful.

uvicorn limits how long a connection may be idle after an answer. Here, a head must come in time and
is limited in size, and a client that does not read is cut off. At most `MOST_CONNECTIONS` are
served at once. There are fewer where the system gives the process few files: some of these are left
for all else.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from localkv.server.event_stream import to_json
from localkv.server.failures import RequestError

MOST_CONNECTIONS = 1024
SPARE_FILES = 64
"""Files that connections leave to the rest of the process: pipes, logs, and another engine."""
MOST_HEAD = 64 << 10
"""Bytes of a request's line and headers; a little more may come at once."""
MOST_HEADERS = 128
"""Most headers of a request."""
LEAST_CHUNK, MOST_SMALL = 64, 256
"""Least bytes that the chunks of a body have on average, after `MOST_SMALL` chunks."""
MOST_PIPELINED = 16
"""Requests that wait for the answer to an earlier one of their connection."""
HEAD_SECONDS = 10.0
"""How long a head may take, from the connection or the end of the answer before."""
IDLE_SECONDS = 75
"""How long a connection stays without a request."""
STUCK_SECONDS = 30.0
"""How long a client may read nothing of what waits for it."""
LINGER_SECONDS = 1.0
"""How long a refused connection stays, so that its client can read why: closed with bytes of it
unread, the system would drop the answer, too."""


def most_connections() -> tuple[int, int]:
    """Connections that are served, and all that are open at once with those that are told that
    there are too many; what exceeds that is closed without a word."""
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if n_files == resource.RLIM_INFINITY:
        n_files = 4 * MOST_CONNECTIONS
    most_open = max(2, n_files - SPARE_FILES)
    return min(MOST_CONNECTIONS, most_open // 2), most_open


class Connection(HttpToolsProtocol):
    """One client's; the arguments are uvicorn's."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None
        self._is_refused = False
        self._has_head = False
        self._n_head = self._n_chunks = self._n_chunked = 0
        most_served, most_open = most_connections()
        if len(self.connections) > most_open:
            self._is_refused = True
            self.transport.abort()
            return
        if len(self.connections) > most_served:
            error = RequestError(503, "too many connections", headers={"retry-after": "1"})
            self._refuse(error)
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if self._stuck is not None:
            self._stuck.cancel()
        super().connection_lost(exc)
        # uvicorn tells the latest request only; an earlier one may still be answered
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        had_head, self._n_chunks, self._n_chunked = self._has_head, 0, 0
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        if not self._has_head:
            self._n_head = 1 if had_head else self._n_head + len(data)
            if self._n_head > MOST_HEAD:
                self._refuse(RequestError(431, "the headers are too large"))
                return
        # part of a head, or what is left of a body whose answer is complete
        if not self._is_answering and self._timer is None:
            self._expect_head()

    def on_message_begin(self) -> None:
        self._has_head = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head or self._is_refused:  # trailers would count as headers
            return
        super().on_header(name, value)
        if len(self.headers) > MOST_HEADERS:
            self._refuse(RequestError(431, f"there are more than {MOST_HEADERS} headers"))

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        super().on_body(body)
        self._n_chunks += 1
        self._n_chunked += len(body)
        if self._n_chunks > MOST_SMALL + self._n_chunked // LEAST_CHUNK:
            self._refuse(
                RequestError(400, f"chunks have fewer than {LEAST_CHUNK} bytes on average")
            )

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        if self._is_refused:
            return
        self._has_head, self._n_head = True, 0
        self._cancel_timer()
        if len(self.pipeline) >= MOST_PIPELINED:
            self.transport.close()
            return
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self._stuck or self.loop.call_later(STUCK_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def send_400_response(self, msg: str) -> None:
        """Say that what came is not HTTP."""
        self._refuse(RequestError(400, msg))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            error = RequestError(408, f"no request came within {HEAD_SECONDS:g} s")
            self._refuse(error) if self._n_head and not self._has_head else self.transport.close()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: RequestError) -> None:
        """Answer without a request, and close once there was time to read the answer."""
        self._is_refused = True
        if self._is_answering:  # it waits for a body that is not read any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = to_json({"error": error.fields})
        lines = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\nconnection: close\r\n",
            b"content-length: %d\r\n" % len(body),
            *(f"{name}: {value}\r\n".encode() for name, value in error.headers.items()),
            b"\r\n",
            body,
        ]
        self.transport.write(b"".join(lines))
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
