"""Requests to Hugging Face, which may be broken or hostile: what is asked, and what is believed.

The HTTP client, the access token and the errors are huggingface_hub's, so HF_ENDPOINT, HF_TOKEN and
the proxy variables mean the same as to it. It is imported when the first request is made. The
library sets no limits, so they are here: nothing that a server does takes for ever or much memory.
Headers have to be there in time. The bodies of redirects and refusals are not read. Compressed
bodies, which could be of any size, are not asked for and not taken.

The library takes a listing as it comes. Here all that is read from one is checked first, so that
names, sizes and digests are what the rest of the package takes them for. Each error is one line.
"""

from __future__ import annotations

import json
import re
import reprlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from threading import Timer
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from localkv.errors import HubError, byte_size, printable, quoted
from localkv.loader.hub.reference import HubReference, RepoFile, is_model_path, is_plain_path

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

MAX_LISTING_BYTES = 8 << 20
"""The most that a listing may take; one of ten thousand files takes 3 MiB."""

LISTING_SECONDS = 60.0
"""Until a listing has to be there, once it has begun."""

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)")
_TRANSIENT = (408, 429, 500, 502, 503, 504)
# The HTTP client's errors that another try can mend; by name, whichever client it is.
_TRANSIENT_ERRORS = {"TimeoutException", "NetworkError", "RemoteProtocolError"}


FILE_INSTEAD = "-m FILE runs a model that was brought here in another way"
NO_NETWORK = f"behind a proxy, set HTTPS_PROXY; {FILE_INSTEAD}"
"""The hint where the hub gives no answer at all."""

MAX_FILES = 10_000
"""GGUF files of a repository."""

MAX_FILE_BYTES = 1 << 50

_SHORT = reprlib.Repr()
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class HubUnreachableError(HubError):
    """No answer, or one that says to try again."""


class TooSlowError(Exception):
    """A server didn't answer in time, or its answer drips."""


class NonsenseError(Exception):
    """An answer that no hub gives; the message names the error in it, in one line."""


@dataclass(frozen=True)
class Listing:
    """The GGUF files of a repository at one commit.

    Attributes:
        commit: 40 hexadecimal digits.
        files: with digests; names and sizes are such that they can be laid out in a folder.
    """

    commit: str
    files: tuple[RepoFile, ...]


def host() -> str:
    """The host that is asked, for messages: without a name and password for it."""
    from huggingface_hub import constants

    try:
        netloc = urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2]
        return printable(netloc) or quoted(constants.ENDPOINT)
    except ValueError:
        return quoted(constants.ENDPOINT)


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids requests."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def list_files(reference: HubReference) -> Listing:
    """Ask which files a repository has.

    Raises:
        HubError: there is no such repository or revision, or no access to it.
        HubUnreachableError: no answer.
    """
    revision = quote(reference.revision, safe="")
    url = f"{_endpoint()}/api/models/{reference.repo}/revision/{revision}"
    with (
        _one_line_errors(reference),
        answer_of(url, _headers(), params={"blobs": "true"}) as response,
    ):
        body, end = bytearray(), time.monotonic() + LISTING_SECONDS
        for piece in body_of(response):
            body += piece
            if len(body) > MAX_LISTING_BYTES:
                raise NonsenseError(f"its listing takes more than {byte_size(MAX_LISTING_BYTES)}")
            if time.monotonic() > end:
                raise TooSlowError(f"a listing takes more than {LISTING_SECONDS:g} seconds")
        return read_listing(bytes(body))


@contextmanager
def open_file(
    reference: HubReference, commit: str, file: RepoFile, start: int, end: int | None = None
) -> Iterator[tuple[bool, Iterator[bytes]]]:
    """Ask for the bytes of a file from `start` on, up to but without `end` if that is given.

    Yields:
        Whether the bytes begin there (else at 0, from a server without ranges), and the bytes.

    Raises:
        HubError: the server refuses.
        HubUnreachableError: no answer, or the connection is cut; also while the bytes are read.
    """
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(reference.repo, file.path, revision=commit)
    # A range from the first byte on too: hosts of large files serve them only so.
    last = "" if end is None else end - 1
    headers = {**_headers(), "Range": f"bytes={start}-{last}"}
    with _one_line_errors(reference, file), answer_of(url, headers) as response:
        yield _is_rest(response, file, start), body_of(response)


def _endpoint() -> str:
    """The address of the hub, which a variable may have set to anything."""
    from huggingface_hub import constants

    endpoint = constants.ENDPOINT
    if " " not in endpoint and can_be_asked(endpoint):
        return endpoint
    raise HubError(
        f"HF_ENDPOINT is {quoted(endpoint)}, which is not the address of a hub",
        hint="such an address is https://huggingface.co",
    )


def _headers() -> dict[str, str]:
    """Who asks, with the access token if there is one.

    Not huggingface_hub's, which would ask the hub first, without any limit, for names of variables
    to look for and tell it of.
    """
    from huggingface_hub import constants

    headers = {"User-Agent": "localkv"}
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else _token()
    return headers if token is None else headers | {"Authorization": f"Bearer {token}"}


def _token() -> str | None:
    """The access token, if there is one."""
    from huggingface_hub import get_token

    try:
        token = get_token()
        if token is None or (token.isascii() and token.isprintable()):
            return token
        problem = "has characters that none can have"
    except (OSError, ValueError) as error:
        problem = f"can't be read: {type(error).__name__}"
    hint = "set HF_TOKEN to a valid one, or unset it (or run `hf auth logout`)"
    raise HubError(f"the access token {problem}", hint=hint)


def _is_rest(response: Any, file: RepoFile, start: int) -> bool:
    """Whether an answer's bytes begin where they should, else with the first."""
    if response.status_code != 206:
        length = response.headers.get("Content-Length", "")
        _check_size(file, length)
        return False
    content_range = response.headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(content_range)
    if match is None or int(match[1]) != start:
        raise NonsenseError(f"bytes from {start} on are {quoted(content_range)}")
    _check_size(file, match[2])
    return True


def _check_size(file: RepoFile, stated: str) -> None:
    """Whether a file has the size of the listing, if its host states one."""
    if stated.isascii() and stated.isdigit() and int(stated[:20]) != file.n_bytes:
        raise _other_size(file, int(stated[:20]))


def _other_size(file: RepoFile, n_bytes: int | None) -> HubError:
    has = "fewer" if n_bytes is None else f"{n_bytes}"
    return HubError(
        f"{file.path} should have {file.n_bytes} bytes, and {host()} has {has} of it",
        hint="try again later, and tell the authors of the repository if it stays so",
    )


# -- One request


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
        huggingface_hub's errors, and its HTTP client's: a refusal, or no answer.
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


# -- The check of a listing


def read_listing(body: bytes) -> Listing:
    """Read the JSON of a repository.

    Raises:
        NonsenseError: it is no JSON, or something in it can't be true.
    """
    try:
        listing = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NonsenseError("it is not JSON") from error
    if not isinstance(listing, dict):
        raise NonsenseError("it is not an object")
    siblings = listing.get("siblings")
    if not isinstance(siblings, list):
        raise NonsenseError("it has no list of files")
    files = [file for file in map(_file, siblings) if file is not None]
    _check_together(files)
    return Listing(_text(listing.get("sha"), _COMMIT.fullmatch, "the commit"), tuple(files))


def _file(sibling: Any) -> RepoFile | None:
    """A file of the list, or None if it is none of ours."""
    if not isinstance(sibling, dict):
        raise NonsenseError(f"a file is {_shown(sibling)}")
    path = _text(sibling.get("rfilename"), None, "the name of a file")
    if not path.lower().endswith(".gguf"):
        return None
    if not (is_plain_path(path) and is_model_path(path)):
        raise NonsenseError(f"a file is called {quoted(path)}")
    lfs = sibling.get("lfs")
    if lfs is None:
        size = _size(sibling.get("size"), path)
        return RepoFile(path, size, _digest(sibling.get("blobId"), _SHA1, path))
    if not isinstance(lfs, dict):
        raise NonsenseError(f"the storage of {quoted(path)} is {_shown(lfs)}")
    size = _size(lfs.get("size"), path)
    if sibling.get("size") is not None and _size(sibling["size"], path) != size:
        raise NonsenseError(f"{quoted(path)} has two sizes")
    return RepoFile(path, size, _digest(lfs.get("sha256"), _SHA256, path))


def _check_together(files: list[RepoFile]) -> None:
    """Whether the files can be in one folder, and their bytes in one store."""
    if len(files) > MAX_FILES:
        raise NonsenseError(f"{len(files)} GGUF files, more than {MAX_FILES}")
    paths: set[str] = set()
    sizes: dict[str | None, int] = {}
    for file in files:
        if file.path in paths:
            raise NonsenseError(f"{quoted(file.path)} is there twice")
        paths.add(file.path)
        if sizes.setdefault(file.digest, file.n_bytes) != file.n_bytes:
            raise NonsenseError(f"{quoted(file.path)} has another file's checksum")
    for path in paths:
        if folder := next((folder for folder in _folders(path) if folder in paths), None):
            raise NonsenseError(f"{quoted(folder)} is a file and a folder")


def _folders(path: str) -> Iterable[str]:
    return (path[:i] for i, c in enumerate(path) if c == "/")


def _size(value: Any, path: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_FILE_BYTES:
        raise NonsenseError(f"the size of {quoted(path)} is {_shown(value)}")
    return value


def _digest(value: Any, pattern: re.Pattern[str], path: str) -> str:
    return _text(value, pattern.fullmatch, f"the checksum of {quoted(path)}")


def _text(value: Any, is_good: Callable[[str], object] | None, what: str) -> str:
    if not isinstance(value, str) or (is_good is not None and not is_good(value)):
        raise NonsenseError(f"{what} is {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """A value of any kind, in a few words."""
    if isinstance(value, str):
        return quoted(value)
    if value is None:
        return "missing"
    if isinstance(value, int | float):
        return _SHORT.repr(value)
    return "a list" if isinstance(value, list) else "an object"


# -- Errors, each one line


@contextmanager
def _one_line_errors(reference: HubReference, file: RepoFile | None = None) -> Iterator[None]:
    from huggingface_hub import errors
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its warnings would go between our lines
    repo = reference.repo
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise HubUnreachableError(
            f"{host()} is not asked: HF_HUB_OFFLINE is set", hint=f"unset it; {FILE_INSTEAD}"
        ) from error
    except errors.GatedRepoError as error:
        raise HubError(
            f"{repo} is open only to those who have accepted its terms",
            hint=f"accept them on https://{host()}/{repo}, and set HF_TOKEN to your access token",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise _not_found(repo, _token()) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{repo} has no revision {quoted(reference.revision)}") from error
    except errors.EntryNotFoundError as error:
        raise HubError(f"{repo} no longer has this file", hint="run the command again") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 416 and file is not None:
            raise _other_size(file, None) from error
        if status == 401 and _token() is None:  # the hub hides private repositories in this way
            raise _not_found(repo, None) from error
        raise _status_error(status, repo) from error
    except errors.HFValidationError as error:
        raise HubError(f"{repo} is not a name that {host()} can have") from error
    except NonsenseError as error:
        raise HubError(f"{host()} gave an answer that makes no sense: {error}") from error
    except TooSlowError as error:
        raise HubUnreachableError(f"{host()} is too slow: {error}") from error
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # the HTTP client's own
        reason = printable(str(error)[:200]) or type(error).__name__
        names = {kind.__name__ for kind in type(error).__mro__}
        kind = HubUnreachableError if names & _TRANSIENT_ERRORS else HubError
        hint = None if "RemoteProtocolError" in names else NO_NETWORK  # there was an answer
        raise kind(f"{_asked(error)} can't be reached: {reason}", hint=hint) from error


def _asked(error: Any) -> str:
    """The host that a request was for, which a redirect can have named."""
    with suppress(RuntimeError):  # there was no request yet
        return printable(error.request.url.netloc.decode())
    return host()


def _not_found(repo: str, token: str | None) -> HubError:
    hint = "check the spelling, and whether your access token can read it"
    if token is None:
        hint = "if it is private, set HF_TOKEN to an access token that can read it"
    return HubError(f"{repo} is not a repository on {host()}", hint=hint)


def _status_error(status: int, repo: str) -> HubError:
    if status == 401:
        return HubError(
            f"{host()} does not accept your access token",
            hint="set HF_TOKEN to a valid one, or unset it (or run `hf auth logout`)",
        )
    if status == 403:
        return HubError(f"{host()} denies access to {repo} (403)")
    if status == 429:
        return HubUnreachableError(
            f"{host()} wants fewer requests (429)",
            hint="try again in a few minutes; with HF_TOKEN set more are allowed",
        )
    if status in _TRANSIENT:
        return HubUnreachableError(f"{host()} has an error ({status})", hint="try again later")
    return HubError(f"{host()} answers with status {status} for {repo}")
