"""The HTTP server: uvicorn runs the application, and the engine runs until somebody ends them.

uvicorn limits how long a connection may be idle after an answer. Here, a head must come in time and
is limited in size, and a client that does not read is cut off. At most `MOST_CONNECTIONS` are
served at once. There are fewer where the system gives the process few files: some of these are left
for all else.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from localkv.engine_process.client import STOP_SECONDS
from localkv.engine_process.texts import Facts
from localkv.errors import UsageError, printable
from localkv.server.access import is_loopback
from localkv.server.app import application
from localkv.server.failures import RequestError
from localkv.server.json_answer import to_json
from localkv.server.models import Models
from localkv.server.request_record import AccessLog
from localkv.server.settings import ModelSettings, ServerSettings

OPEN_FILES = 4096
"""Connections and files that the process may have open, if the system allows that many."""
END_SECONDS = 2
"""How long answers have, once they are told that the engine is gone, to say so."""

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


@dataclass
class Ending:
    """How a server is ended: it begins to drain, and then somebody may be in a hurry."""

    begins: asyncio.Event = field(default_factory=asyncio.Event)
    hurries: asyncio.Event = field(default_factory=asyncio.Event)

    def signalled(self) -> None:
        """Ctrl-C or SIGTERM; the second one waits for nobody."""
        (self.hurries if self.begins.is_set() else self.begins).set()


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        UsageError: the address is taken, or is none of this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        reason = reason.partition(" (while attempting")[0]  # which names the address once more
        raise UsageError(
            f"can't listen on {host}:{port}: {reason}", hint="choose another --port or --host"
        ) from None


def check_exposure(settings: ServerSettings, host: str, address: str) -> list[str]:
    """Refuse to let everybody in from other machines; warnings about what else they can see.

    Args:
        host: as the user named it.
        address: that it stands for.

    Raises:
        UsageError: there is no key, and nobody said that there need be none.
    """
    if is_loopback(address):
        return []
    if not settings.api_keys and not settings.is_insecure:
        raise UsageError(
            f"--host {host} lets other machines in, without a key",
            hint="set --api-key-file FILE, or --insecure if all who reach it may use it",
        )
    if settings.ssl_cert is None:
        return ["requests and keys of other machines are not encrypted (--ssl-cert-file)"]
    return []


def uvicorn_config(models: Models) -> uvicorn.Config:
    """uvicorn's settings, loaded.

    Raises:
        UsageError: the files for TLS can't be used.
    """
    settings = models.settings
    # what clients send is none of the log's business, and errors are told elsewhere
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
    # which warns of every write to a connection that a client has closed
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    config = uvicorn.Config(
        application(models),
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=END_SECONDS,
        ssl_keyfile=settings.ssl_key,
        ssl_certfile=settings.ssl_cert,
    )
    try:
        config.load()
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = " and ".join(
            printable(file) for file in (settings.ssl_cert, settings.ssl_key) if file
        )
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{files}: {reason}", hint="--ssl-cert-file and --ssl-key-file are files in PEM"
        ) from None
    return config


class _Uvicorn(uvicorn.Server):
    """Signals are the caller's."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


async def serve(
    settings: ServerSettings,
    *,
    say: Callable[[str], None],
    on_listening: Callable[[str], None],
    on_ready: Callable[[ModelSettings, Facts], None],
    ending: Ending,
) -> None:
    """Serve until `ending` begins.

    Args:
        say: tells the user what happens, a line each.
        on_listening: is told the address.
        on_ready: is told of each model that was loaded.

    Raises:
        LocalKVError: the address can't be had, or the engine of the only model can't be kept
            running.
    """
    _allow_open_files()
    _keep_turns_short()
    models = Models(settings, say, on_ready)
    models.log = None if settings.log_file is None else AccessLog(settings.log_file, say)
    server = _Uvicorn(uvicorn_config(models))
    with contextlib.ExitStack() as stack:
        sockets, addresses, warnings, port = [], [], [], settings.port
        for name in settings.hosts:
            sockets.append(stack.enter_context(listening(name, port)))
            host, port = sockets[-1].getsockname()[:2]
            warnings += check_exposure(settings, name, host)
            scheme = "http" if settings.ssl_cert is None else "https"
            addresses.append(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        on_listening(" and ".join(addresses))
        for line in dict.fromkeys(warnings):
            say(f"warning: {line}")
        await _run(server, sockets, models, ending)


async def _run(
    server: _Uvicorn, sockets: list[socket.socket], models: Models, ending: Ending
) -> None:
    serving = asyncio.create_task(server.serve(sockets=sockets))
    loading = asyncio.create_task(models.load())
    stopping = asyncio.create_task(ending.begins.wait())
    breaking = asyncio.create_task(models.broken.wait())
    hurrying = asyncio.create_task(_hurry(models, ending.hurries))
    try:
        await asyncio.wait({serving, breaking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if models.problem is not None:
            raise models.problem
        models.is_draining = True
        await _drained(server, models.settings.drain, ending.hurries)
    finally:
        await models.close()  # answers that are not complete say so
        server.should_exit = True
        server.force_exit = ending.hurries.is_set()
        with contextlib.suppress(Exception):
            await serving
        for task in (loading, stopping, breaking, hurrying):
            task.cancel()
        if models.log is not None:
            models.log.close()


async def _hurry(models: Models, hurries: asyncio.Event) -> None:
    """Give engines no more time to write texts to the disk once somebody hurries."""
    await hurries.wait()
    for one in models:
        one.supervisor.client.stop_seconds = STOP_SECONDS


async def _drained(server: _Uvicorn, seconds: float, hurries: asyncio.Event) -> None:
    """Wait until all requests are answered, or nobody wants to wait any more."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while server.server_state.tasks and loop.time() < end and not hurries.is_set():
        await asyncio.sleep(0.02)


def _keep_turns_short() -> None:
    """Let no thread hold Python's lock for long, since the event loop needs it."""
    sys.setswitchinterval(0.001)
    gc.set_threshold(
        100_000, 50, 100
    )  # a body of 100,000 lists is no reason to look at all there is


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
