"""Notes what becomes of each request: the outermost part of the application."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localkv.server.request_record import RequestRecord, current, request_id

if TYPE_CHECKING:
    from localkv.server.front import Front

LOST = 499
"""nginx's status of a request whose client was gone before an answer."""
WARNING = "x-localkv-warning"
"""The header that names fields of a request that have no effect on this model."""
_LONGEST = 1000


class Recorder:
    """Gives each request an id, and writes its line into the log.

    Args:
        app: answers.
        front: has the log and the metrics, if there are any.
    """

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app, self._front = app, front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        record = RequestRecord(request_id(given), scope["method"], scope["path"])
        record.address = (scope.get("client") or ("",))[0]
        record.keep = partial(self._front.work.keep, record)
        scope.setdefault("state", {})["record"] = record
        token = current.set(record)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.id
                if record.warnings:
                    headers[WARNING] = _as_header("; ".join(record.warnings))
                    self._front.tell_once(record.warnings)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            current.reset(token)
            for end in record.at_end:
                end()
            self._front.work.give_back(record)
            record.status = record.status or LOST
            if self._front.metrics is not None:
                self._front.metrics.answered(record)
            if self._front.log is not None:
                self._front.log.write(record)


def _as_header(text: str) -> str:
    """A text as a header may hold it."""
    return ascii(text)[1:-1][:_LONGEST]
