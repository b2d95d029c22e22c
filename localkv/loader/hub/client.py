"""Requests to Hugging Face through huggingface_hub, and its errors as one line each.

HF_ENDPOINT, HF_TOKEN and the proxy variables mean the same as to huggingface_hub. It is imported
when the first request is made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote, urlsplit

from localkv.errors import HubError, byte_size, printable, quoted
from localkv.loader.hub.exchange import TooSlowError, answer_of, body_of, can_be_asked
from localkv.loader.hub.listing import Listing, NonsenseError, read_listing
from localkv.loader.hub.reference import HubReference
from localkv.loader.hub.repo_model import RepoFile

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


class HubUnreachableError(HubError):
    """No answer, or one that says to try again."""


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
