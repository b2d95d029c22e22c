"""Requests to Hugging Face through huggingface_hub, and its errors as one line each.

HF_ENDPOINT, HF_TOKEN and the proxy variables mean what they mean to huggingface_hub. It is imported
when the first request is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from localkv.errors import HubError, quoted
from localkv.loader.hub.reference import HubReference
from localkv.loader.hub.repo_model import RepoFile

if TYPE_CHECKING:
    from collections.abc import Callable

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TRANSIENT = (408, 429, 500, 502, 503, 504)


class HubUnreachableError(HubError):
    """No answer, or one that says to try again."""


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit."""

    commit: str
    files: tuple[RepoFile, ...]


def host() -> str:
    """The host that is asked, for messages."""
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).netloc


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
    from huggingface_hub import HfApi, constants

    with _one_line_errors(reference):
        try:
            info = HfApi(library_name="localkv").model_info(
                reference.repo,
                revision=reference.revision,
                files_metadata=True,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            )
        except (
            json.JSONDecodeError,
            KeyError,
            TypeError,
        ) as error:  # no hub
            raise _nonsense(str(error)) from error
        files = tuple(
            RepoFile(
                _checked(sibling.rfilename, _is_plain_path),
                sibling.size or 0,
                _checked(
                    (sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or "",
                    _DIGEST.fullmatch,
                ),
            )
            for sibling in info.siblings or ()
            if sibling.rfilename.lower().endswith(".gguf")
        )
        return Listing(_checked(info.sha or "", _COMMIT.fullmatch), files)


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
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # its names are lazy
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    url = hf_hub_url(reference.repo, file.path, revision=commit)
    headers = build_hf_headers(library_name="localkv")
    # A range from the first byte on too: hosts of large files serve them only so.
    last = "" if end is None else end - 1
    headers |= {"Accept-Encoding": "identity", "Range": f"bytes={start}-{last}"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with (
        _one_line_errors(reference),
        get_session().stream("GET", url, headers=headers, timeout=timeout) as response,
    ):
        hf_raise_for_status(response)
        yield response.status_code == 206, response.iter_bytes()


def _is_plain_path(path: str) -> bool:
    """Whether a path stays in the folder that it is relative to."""
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not path.startswith("/") and "\\" not in path


def _checked(value: str, is_good: Callable[[str], object]) -> str:
    """A value that is to become part of a path on disk."""
    if not is_good(value):
        raise _nonsense(value)
    return value


def _nonsense(text: str) -> HubError:
    return HubError(f"{host()} gave an answer that makes no sense: {quoted(text)}")


@contextmanager
def _one_line_errors(reference: HubReference) -> Iterator[None]:
    from huggingface_hub import errors, get_token
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its warnings would go between our lines
    repo = reference.repo
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise HubUnreachableError(f"{host()} is not asked: HF_HUB_OFFLINE is set") from error
    except errors.GatedRepoError as error:
        raise HubError(
            f"{repo} is open only to those who have accepted its terms",
            hint=f"accept them on https://{host()}/{repo}, and set HF_TOKEN to your access token",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise _not_found(repo, get_token()) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{repo} has no revision {quoted(reference.revision)}") from error
    except errors.EntryNotFoundError as error:
        raise HubError(f"{repo} has no such file any more", hint="run the command again") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401 and get_token() is None:  # so the hub hides what is private
            raise _not_found(repo, None) from error
        raise _status_error(status, repo) from error
    except errors.HFValidationError as error:
        raise HubError(f"{repo} is not a name that {host()} can have") from error
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # the HTTP client's own
        reason = str(error) or type(error).__name__
        raise HubUnreachableError(f"{host()} can't be reached: {reason}") from error


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
        return HubUnreachableError(f"{host()} is out of order ({status})", hint="try again later")
    return HubError(f"{host()} answers with status {status} for {repo}")
