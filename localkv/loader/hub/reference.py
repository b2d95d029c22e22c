"""Names of models on Hugging Face, as users write them.

    ORG/REPO               the usual file of a repository
    ORG/REPO:Q8_0          the file of this type
    ORG/REPO/DIR/X.gguf    this file
    hf.co/ORG/REPO...      the same three; also huggingface.co/, https:// and hf://
    https://huggingface.co/ORG/REPO/blob/REVISION/X.gguf    the address in a browser

Nothing here looks at the disk or at the network.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from localkv.errors import UsageError, quoted
from localkv.loader.hub.plain_path import is_model_path, is_plain_path

DEFAULT_REVISION = "main"

_HOSTS = ("huggingface.co", "hf.co", "www.huggingface.co")
_SCHEME = re.compile(r"(https?|hf)://", re.IGNORECASE)
# As the hub names repositories: letters, digits and single separators, which may not be "--".
_REPO = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_QUANT = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_WEB_PAGES = ("blob", "resolve", "raw", "tree")


@dataclass(frozen=True)
class HubReference:
    """The model that a name asks for.

    Attributes:
        repo: "org/repo".
        quant: a type of weights, as written, or None.
        file: a file's path in the repository, or None.
        revision: a branch, tag or commit.
    """

    repo: str
    quant: str | None = None
    file: str | None = None
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        if self.file is not None:
            return f"{self.repo}/{self.file}"
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


def names_the_hub(text: str) -> bool:
    """Whether a text can only be a model on Hugging Face, and no path."""
    return _SCHEME.match(text) is not None or text.lower().startswith(
        tuple(f"{host}/" for host in _hosts())
    )


def is_repo(text: str) -> bool:
    """Whether a text is a repository's name on the hub: "org/repo"."""
    return _REPO.fullmatch(text) is not None


def parse_reference(text: str, file: str | None = None) -> HubReference:
    """Read a name.

    Args:
        file: a path in the repository, if it is given separately (`--hf-file`).

    Raises:
        UsageError: the text is no such name, or it names another file than `file`.
    """
    rest, revision = _without_host(text), DEFAULT_REVISION
    parts = rest.split("/")
    if len(parts) > 3 and parts[2] in _WEB_PAGES:
        revision = unquote(parts[3])
        parts[2:4] = []
        if not is_plain_path(revision):  # it becomes a path in the cache
            raise UsageError(f"{quoted(revision)} is not a branch, tag or commit")
    repo, _, quant = "/".join(parts[:2]).partition(":")
    inner = unquote("/".join(parts[2:])) or None
    quant_fits = _QUANT.fullmatch(quant) if quant else repo == "/".join(parts[:2])
    file_fits = inner is None or (_is_file(inner) and not quant)
    if not (is_repo(repo) and quant_fits and file_fits):
        raise UsageError(
            f"{quoted(text)} does not name a model on Hugging Face",
            hint="such a name is ORG/REPO, ORG/REPO:QUANT or ORG/REPO/FILE.gguf",
        )
    if file is not None:
        if not _is_file(file):
            raise UsageError(f"{quoted(file)} is not the path of a GGUF file")
        if quant or inner not in (None, file):
            raise UsageError(f"{quoted(text)} and {quoted(file)} name two files, give one")
        inner = file
    return HubReference(repo, quant or None, inner, revision)


def _is_file(path: str) -> bool:
    return is_plain_path(path) and is_model_path(path)


def _without_host(text: str) -> str:
    """The part after the host, without a query."""
    scheme = _SCHEME.match(text)
    if scheme is None:
        return text.split("/", 1)[1] if names_the_hub(text) else text
    if scheme[1].lower() == "hf":
        return text[scheme.end() :]
    try:
        url = urlsplit(text)
    except ValueError as error:
        raise UsageError(f"{quoted(text)} is not an address: {error}") from error
    if url.netloc.lower() not in _hosts():
        raise UsageError(
            f"{quoted(text)} is not on Hugging Face",
            hint="download the file and give its path with -m",
        )
    return url.path.strip("/")


def _hosts() -> tuple[str, ...]:
    """Hugging Face's hosts, and that of a mirror."""
    try:
        mirror = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc.lower()
    except ValueError:  # who asks it says so
        mirror = ""
    return (*_HOSTS, mirror) if mirror else _HOSTS
