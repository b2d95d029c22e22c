"""Who may call a server: the keys that requests must have, and the hosts and origins that it knows.

Keys are compared in constant time. `Guard` asks all of it before anybody looks at a request, and
how large and how fast its body is.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localkv.errors import UsageError, byte_size, printable
from localkv.server.failures import RequestError
from localkv.server.json_answer import error_answer
from localkv.server.settings import MOST_BODY
from localkv.system.files import read_input

if TYPE_CHECKING:
    from localkv.server.models import Models


MOST_FILE = 1 << 20
"""Bytes of a file of keys."""


class ApiKeys:
    """Keys that a request may have. Only their digests are kept.

    Args:
        keys: what they are; none lets everybody in.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in sorted(keys)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def number(self, given: str) -> int | None:
        """The number of a key, from 1; None for none. It takes as long for each."""
        digest, found = _digest(given), None
        for number, known in enumerate(self._digests, 1):
            if hmac.compare_digest(digest, known):
                found = number
        return found


def given_key(headers: Mapping[str, str]) -> str:
    """The key of a request: `Authorization: Bearer KEY`, or `x-api-key` as Anthropic's clients
    have it; empty if there is none."""
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip()


def key_origins(keys: Iterable[str]) -> tuple[bytes, ...]:
    """What texts of each key have in common, by the key's number, and b"" for none.

    These are digests, so that a prompt cache on the disk has no key in it.
    """
    digests = (_digest(key) for key in sorted(keys))
    return b"", *(hashlib.blake2b(one, person=b"localkv cache").digest() for one in digests)


def read_keys(listed: str | None, path: str | os.PathLike[str] | None) -> frozenset[str]:
    """Read keys from a list with commas between them, and from a file with one a line.

    Raises:
        UsageError: the file can't be read, or where keys were to be there are none.
    """
    keys = set[str]()
    if listed is not None:
        keys |= _named(listed.split(","), "--api-key")
    if path is not None:
        name = f"--api-key-file {printable(path)}"
        try:
            text = read_input(path, MOST_FILE, name).decode()
        except OSError as error:
            raise UsageError(f"{name}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{name}: not UTF-8") from error
        keys |= _named(text.splitlines(), name)
    return frozenset(keys)


def _named(parts: Iterable[str], source: str) -> set[str]:
    keys = {key for part in parts if (key := part.strip())}
    if not keys:
        raise UsageError(f"{source} has no key", hint="leave it out to let everybody in")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


ANY, LOCAL, OPAQUE = "*", "localhost", "null"
"""Words for all origins, for origins of this machine, and for pages that have none."""
LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"
"""Regular expression of an origin of this machine, at any port."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([^\s/?#@:\[\]]+|\[[0-9a-f:.]+\])(:[0-9]+)?")


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def known_hosts(hosts: Collection[str], others: Collection[str]) -> frozenset[str]:
    """Names that a server goes by.

    Args:
        hosts: where it was told to listen.
        others: further ones.
    """
    names = {"localhost", *hosts, socket.gethostname(), *others}
    return frozenset(name.strip().lower().rstrip(".") for name in names if name.strip())


def is_known(authority: str, names: Collection[str]) -> bool:
    """Whether a `Host` is one of them, or an address, which nobody can rebind."""
    host = _host(authority)
    if host in names or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_same(origin: str, authority: str) -> bool:
    """Whether an `Origin` is this server itself; a proxy may have another scheme."""
    try:
        return urlsplit(origin).netloc.lower() == authority.lower() != ""
    except ValueError:
        return False


def checked_origins(origins: Collection[str]) -> tuple[str, ...]:
    """Origins as browsers write them.

    Raises:
        UsageError: one is none.
    """
    found = tuple(origin.lower() for origin in origins)
    for origin in found:
        if origin not in (ANY, LOCAL, OPAQUE) and not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"{origin!r:.100} is no origin",
                hint="one is such as https://chat.example or http://10.0.0.5:3000; localhost "
                "stands for all of this machine, * for all there are",
            )
    return found


def may_call(origin: str, allowed: Collection[str]) -> bool:
    """Whether pages of an `Origin` may call a server that allows some."""
    is_local = LOCAL in allowed and re.fullmatch(LOCAL_ORIGIN, origin) is not None
    return is_local or ANY in allowed or origin in allowed


def _host(authority: str) -> str:
    """Without a port, and brackets of an address."""
    try:
        host = urlsplit(f"//{authority}").hostname
    except ValueError:
        return authority.lower()
    return (host or "").lower().rstrip(".")


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
        models: their server's settings say what may come in.
    """

    def __init__(self, app: ASGIApp, models: Models) -> None:
        settings = models.settings
        self._app, self._models = app, models
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
        if self._models.is_draining and path not in WHILE_DRAINING:
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
        if origin is None or may_call(origin, self._models.settings.cors) or is_same(origin, host):
            return
        raise RequestError(
            403, f"pages of {origin!r:.100} may not call this server", "start it with --cors ORIGIN"
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
