"""What is noted of a request while it is answered, and its line in the log.

The line is JSON: when, which, how it ended, how long it took, how many tokens. It never has a key,
a part of a prompt or of an answer; a path is cut before its query.
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from logging.handlers import WatchedFileHandler
from typing import TYPE_CHECKING

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localkv.errors import UsageError, printable

if TYPE_CHECKING:
    from localkv.server.models import Models


STDERR = "-"
CLOSED = 499
"""nginx's status of a request whose client is gone before the answer is; it is for the log only."""
WARNING = "x-localkv-warning"
"""The header that names fields of a request that have no effect on this model."""
_LONGEST = 1000
_GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass
class RequestRecord:
    """One request; nothing here tells what it is about.

    Attributes:
        id: the client's, or one of ours.
        address: the client's.
        key: the number of its API key; 0 for none.
        n_body: bytes of its body.
        n_kept: bytes of memory that it needs, about.
        model: the one that answers it.
        waited: seconds that it waited until its model was loaded.
        n_prompt, n_cached, n_generated: tokens of all its texts.
        ended: why texts of it ended before they were complete.
        warnings: one line for each field that has no effect on this model.
        at_end: called when nothing more is sent, whatever the reason; ends what is still open.
        keep: is told of bytes that the request needs, and of fewer when they are free again; raises
            RequestError where there is no room.
    """

    id: str
    method: str
    path: str
    address: str = ""
    key: int = 0
    n_body: int = 0
    n_kept: int = 0
    status: int = 0
    model: str = ""
    waited: float = 0.0
    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    ended: str = ""
    warnings: tuple[str, ...] = ()
    at_end: list[Callable[[], None]] = field(default_factory=list)
    keep: Callable[[int], None] = lambda n_bytes: None
    started: float = field(default_factory=time.perf_counter)

    @property
    def client(self) -> str:
        """Who asks: a key, or an address."""
        return f"key {self.key}" if self.key else self.address

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.perf_counter() - self.started


current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)
"""The request that a task answers."""


def warn(*lines: str) -> None:
    """Note what has no effect in the request, for the header and the log."""
    if (record := current.get()) is not None:
        record.warnings = tuple(dict.fromkeys((*record.warnings, *lines)))


def request_id(given: str) -> str:
    """A client's id of a request if it is one, else one of ours."""
    return given if _GIVEN_ID.fullmatch(given) else secrets.token_hex(8)


class AccessLog:
    """Where the lines of requests go.

    If the file was moved away, a new one is begun, as logrotate needs it. If it can't be written,
    the first error is told, and requests go on.

    Args:
        path: of the file; "-" for stderr.
        say: tells the user of a problem.

    Raises:
        UsageError: it can't be written.
    """

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self._say, self._path, self._has_failed = say, path, False
        try:
            self._handler: logging.StreamHandler = (  # type: ignore[type-arg]
                logging.StreamHandler(sys.stderr) if path == STDERR else WatchedFileHandler(path)
            )
        except OSError as error:
            raise UsageError(f"--log-file {printable(path)}: {error.strerror}") from error
        self._handler.handleError = self._failed  # type: ignore[assignment,method-assign]

    def write(self, record: RequestRecord) -> None:
        """Add the line of a request."""
        fields: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": record.id,
            "method": record.method,
            "path": record.path[:200],
            "status": record.status,
            "ms": round(1e3 * record.seconds, 1),
        }
        if record.key:
            fields["key"] = record.key
        if record.model:
            fields["model"] = record.model
        if record.waited:
            fields["load_ms"] = round(1e3 * record.waited, 1)
        if record.n_prompt:
            fields["prompt_tokens"] = record.n_prompt
            fields["cached_tokens"] = record.n_cached
            fields["tokens"] = record.n_generated
        if record.ended:
            fields["ended"] = record.ended
        line = msgspec.json.encode(fields).decode()
        try:
            self._handler.emit(logging.LogRecord("", 0, "", 0, "%s", (line,), None))
        except OSError:  # the file was moved, and its place can't be opened
            self._failed(None)

    def close(self) -> None:
        """No line follows."""
        with suppress(OSError):
            self._handler.close()

    def _failed(self, _: object) -> None:
        if not self._has_failed:
            self._has_failed = True
            error = sys.exc_info()[1]
            self._say(f"warning: --log-file {printable(self._path)}: {error}; lines are lost")


class Recorder:
    """Gives each request an id, and writes its line into the log.

    Args:
        app: answers.
        models: have the log and the metrics, if there are any.
    """

    def __init__(self, app: ASGIApp, models: Models) -> None:
        self._app, self._models = app, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        record = RequestRecord(request_id(given), scope["method"], scope["path"])
        record.address = (scope.get("client") or ("",))[0]
        record.keep = partial(self._models.work.keep, record)
        scope.setdefault("state", {})["record"] = record
        token = current.set(record)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.id
                if record.warnings:
                    headers[WARNING] = _as_header("; ".join(record.warnings))
                    self._models.tell_once(record.warnings)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            current.reset(token)
            for end in record.at_end:
                end()
            self._models.work.give_back(record)
            record.status = record.status or CLOSED
            if self._models.metrics is not None:
                self._models.metrics.answered(record)
            if self._models.log is not None:
                self._models.log.write(record)


def _as_header(text: str) -> str:
    """A text as a header may hold it."""
    return ascii(text)[1:-1][:_LONGEST]
