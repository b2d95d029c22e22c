"""One request to a hub, which may be broken or hostile.

Nothing that a server does takes for ever or much memory: headers have to be there in time, the
bodies of redirects and refusals are not read, and compressed bodies, which could be of any size,
are not asked for and not taken. The client is huggingface_hub's, with its proxies and hooks.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from threading import Timer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from localkv.errors import HubError, printable
from localkv.loader.hub.listing import NonsenseError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

MAX_REDIRECTS = 10

ANSWER_SECONDS = 60.0
"""Until the headers of an answer have to be there, redirects included."""

SLOW_SECONDS, SLOW_BYTES = 60.0, 60 << 10
"""A body that brings fewer bytes than these in this time (seconds) is given up."""

_KEPT_HEADERS = ("X-Error-Code", "X-Error-Message")


class TooSlowError(Exception):
    """A server didn't answer in time, or its answer drips."""


@contextmanager
def answer_of(
    url: str, headers: Mapping[str, str], *, params: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Ask for an address and follow redirects, to other hosts without the access token.

    Yields:
        The HTTP client's response, whose status is 200 or 206; `body_of` reads its body.

    Raises:
        NonsenseError: a redirect leads nowhere, or the body is compressed.
        TooSlowError: see `ANSWER_SECONDS`.
        huggingface_hub's errors, and those of its HTTP client: a refusal, or no answer.
    """
    from huggingface_hub import constants

    client = _client()
    with _Deadline(ANSWER_SECONDS) as deadline:
        request = client.build_request(
            "GET",
            url,
            params=params,
            # A connection of its own, for the deadline to end.
            headers={**headers, "Accept-Encoding": "identity", "Connection": "close"},
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            extensions={"trace": deadline.watch},
        )
        response = _final_response(client, request)
    try:
        _check(response)
        yield response
    finally:
        response.close()


def _client() -> Any:
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # its names are lazy

    try:
        return get_session()
    except Exception as error:  # of any kind: it reads half a dozen variables
        raise HubError(
            f"no request can be made: {printable(str(error)[:200])}",
            hint="check HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and the like",
        ) from error


def _final_response(client: Any, request: Any) -> Any:
    """The first response that is no redirect, its body unread."""
    for _ in range(MAX_REDIRECTS):
        try:
            response = client.send(request, stream=True, follow_redirects=False)
        except (LookupError, ValueError) as error:  # of a client that reads headers as they are
            raise NonsenseError("its headers can't be read") from error
        if not response.is_redirect:
            return response
        response.close()
        location, request = response.headers.get("Location", "").strip(), response.next_request
        if request is None or not _leads_somewhere(location, str(request.url)):
            raise NonsenseError("a redirect leads nowhere")
    raise NonsenseError(f"more than {MAX_REDIRECTS} redirects")


def _leads_somewhere(location: str, address: str) -> bool:
    """Whether a redirect leads to a possible address, without a name and a password."""
    if not location or not can_be_asked(address):
        return False
    try:
        named = urlsplit(location)
    except ValueError:
        return False
    is_relative = not named.scheme and not named.netloc
    return (is_relative or bool(named.hostname)) and "@" not in urlsplit(address).netloc


def can_be_asked(address: str) -> bool:
    """Whether an address is one of HTTP, with a possible host and port."""
    try:
        parts = urlsplit(address)
        host, port = (parts.hostname or "").removesuffix("."), parts.port
    except ValueError:
        return False
    labels = host.split(".")
    is_name = len(host) <= 253 and all(0 < len(label) <= 63 for label in labels)
    if labels[-1].isdecimal() or ":" in host:
        try:
            ip_address(host)
        except ValueError:
            return False
    is_word = address.isprintable() and not set(" %") & set(parts.netloc)
    return is_word and parts.scheme in ("http", "https") and is_name and port != 0


def _check(response: Any) -> None:
    """Raise the error of a status; the body of a refusal isn't read."""
    from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

    if response.status_code in (200, 206):
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise NonsenseError("it is compressed, which was not asked for")
        return
    sent = {name: response.headers.get(name, "") for name in _KEPT_HEADERS}
    kept = {name: value for name, value in sent.items() if value.isascii()}
    bare = type(response)(response.status_code, headers=kept, request=response.request)
    hf_raise_for_status(bare)
    raise NonsenseError(f"its status is {response.status_code}")


def body_of(response: Any) -> Iterator[bytes]:
    """The bytes of an answer as they arrive.

    Raises:
        TooSlowError: too few arrive.
        The HTTP client's errors: the connection is cut.
    """
    since, n_bytes = time.monotonic(), 0
    for piece in response.iter_raw():
        n_bytes += len(piece)
        now = time.monotonic()
        if now - since > SLOW_SECONDS:
            if n_bytes < SLOW_BYTES:
                raise TooSlowError(f"{n_bytes} bytes in {now - since:.0f} seconds")
            since, n_bytes = now, 0
        yield piece


class _Deadline:
    """Ends the connection of a request that has no answer yet: from a thread, as reads block."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer = Timer(seconds, self._end)
        self._timer.daemon = True
        self._stream: Any = None
        self._is_over = False

    def watch(self, event: str, facts: Mapping[str, Any]) -> None:
        """Called by the HTTP client with each of its steps."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self._stream = facts["return_value"]
            if self._is_over:
                self._end()

    def _end(self) -> None:
        self._is_over = True
        if self._stream is not None:
            with suppress(OSError, AttributeError):
                # Not the method of a TLS socket, which is for the thread that reads.
                socket.socket.shutdown(self._stream.get_extra_info("socket"), socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._is_over and isinstance(error, Exception):
            raise TooSlowError(f"no answer in {self._seconds:g} seconds") from error
