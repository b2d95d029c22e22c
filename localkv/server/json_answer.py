"""An answer that is sent once it is whole; whoever goes away before ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localkv.errors import LocalKVError
from localkv.server.engine_client import Texts
from localkv.server.event_stream import to_json
from localkv.server.failures import as_request_error

CLOSED = 499
"""nginx's status of a request whose client is gone; it is for the log only."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(to_json(value), status, headers, media_type="application/json")


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
