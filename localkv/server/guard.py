"""What a request must be before anybody looks at it: from where, for whom, how large, how fast."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localkv.errors import byte_size
from localkv.server.access import ApiKeys, given_key, is_known, is_same, known_hosts, may_call
from localkv.server.failures import RequestError
from localkv.server.json_answer import error_answer
from localkv.server.settings import MOST_BODY

if TYPE_CHECKING:
    from localkv.server.front import Front

MOST_QUERY = 4096
"""Most bytes of a query. A longer one would hold up the event loop, and no client needs it."""
BODY_SECONDS = 30.0
"""How long a body may take to come."""

NO_KEY_NEEDED = frozenset({"/health", "/v1/health", "/", "/index.html", "/favicon.ico"})
FILES_OF_PAGE = "/page/"
"""Paths for everybody, as llama-server has them: whether it is there, and the page."""

WHILE_DRAINING = frozenset({"/metrics"})
"""Paths that answer while the server waits for its last requests."""


class Guard:
    """Lets through what may come in, with a body that ends if it is too large or too slow.

    Args:
        app: what it guards.
        front: its settings say what may come in.
    """

    def __init__(self, app: ASGIApp, front: Front) -> None:
        settings = front.settings
        self._app, self._front = app, front
        self._keys = ApiKeys(settings.api_keys)
        self._hosts = known_hosts(settings.hosts, settings.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except RequestError as error:
            await error_answer(scope["path"], error)(scope, receive, send)
            return
        await self._app(scope, _Body(receive).receive, send)

    def _check(self, scope: Scope) -> None:
        """Refuse what may not come in.

        Raises:
            RequestError: says why.
        """
        headers, path = Headers(scope=scope), scope["path"]
        if len(scope["query_string"]) > MOST_QUERY:
            raise RequestError(414, f"the query is longer than {MOST_QUERY} bytes")
        self._check_names(headers)
        if self._keys and path not in NO_KEY_NEEDED and not path.startswith(FILES_OF_PAGE):
            number = self._keys.number(given_key(headers))
            if number is None:
                raise RequestError(401, "Invalid API Key", headers={"www-authenticate": "Bearer"})
            scope["state"]["record"].key = number
        if self._front.is_draining and path not in WHILE_DRAINING:
            raise RequestError(
                503,
                "the server is ending, and takes no new requests",
                headers={"retry-after": "5", "connection": "close"},
            )
        length = headers.get("content-length", "")
        if length.isascii() and length.isdecimal() and int(length[:20]) > MOST_BODY:
            raise _too_large()

    def _check_names(self, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._keys and not is_known(host, self._hosts):
            raise RequestError(
                403,
                f"the host {host!r:.100} is none of this server's names",
                "start it with --allowed-hosts NAME, or with --api-key",
            )
        if origin is None or may_call(origin, self._front.settings.cors) or is_same(origin, host):
            return
        raise RequestError(
            403,
            f"pages of {origin!r:.100} may not call this server",
            "start it with --cors ORIGIN",
        )


class _Body:
    """A request's body, counted while it comes in."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_complete = False
        self._n_bytes = 0
        self._end: float | None = None

    async def receive(self) -> Message:
        """The next message.

        Raises:
            RequestError: the body has become too large, or takes too long.
        """
        if self._is_complete:
            return await self._receive()
        if self._end is None:
            self._end = asyncio.get_running_loop().time() + BODY_SECONDS
        try:
            async with asyncio.timeout_at(self._end):
                message = await self._receive()
        except TimeoutError:
            self._is_complete = True
            raise RequestError(
                408, f"the body did not come within {BODY_SECONDS:g} s", headers=_CLOSE
            ) from None
        if message["type"] == "http.request":
            self._is_complete = not message.get("more_body", False)
            self._n_bytes += len(message.get("body", b""))
            if self._n_bytes > MOST_BODY:
                self._is_complete = True
                raise _too_large()
        else:
            self._is_complete = True
        return message


_CLOSE = {"connection": "close"}


def _too_large() -> RequestError:
    return RequestError(413, f"the body is larger than {byte_size(MOST_BODY)}")
