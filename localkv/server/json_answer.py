"""An answer that is sent whole; a client that leaves earlier ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localkv.errors import LocalKVError
from localkv.server.engine_client import Texts
from localkv.server.event_stream import to_json
from localkv.server.failures import as_request_error
from localkv.server.request_record import current

CLOSED = 499
"""nginx's status of a request whose client is gone; it is for the log only."""


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
    leaving = asyncio.ensure_future(_gone(request))
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


async def _gone(request: Request) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
