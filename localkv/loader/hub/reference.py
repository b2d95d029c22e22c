"""Names of models on Hugging Face, and the models that they mean in a repository.

    ORG/REPO               the usual file of a repository
    ORG/REPO:Q8_0          the file of this type
    ORG/REPO/DIR/X.gguf    this file
    hf.co/ORG/REPO...      the same three; also huggingface.co/, https:// and hf://
    https://huggingface.co/ORG/REPO/blob/REVISION/X.gguf    the address in a browser

`parse_reference` reads a name as users write it. `repo_models` and `choose` lead from a
repository's files, on the hub or in the cache, to the model that it means. Nothing here looks at
the disk or at the network.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PureWindowsPath
from urllib.parse import unquote, urlsplit

from localkv.errors import HubError, UsageError, byte_size, printable, quoted
from localkv.loader.split_name import split_name

DEFAULT_REVISION = "main"

_HOSTS = ("huggingface.co", "hf.co", "www.huggingface.co")
_SCHEME = re.compile(r"(https?|hf)://", re.IGNORECASE)
# As the hub names repositories: letters, digits and single separators, which may not be "--".
_REPO = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_QUANT = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_WEB_PAGES = ("blob", "resolve", "raw", "tree")

MAX_PART_BYTES = 255
"""The longest name that file systems take."""

MAX_BYTES = 1024
"""The longest path that is taken; the cache's folder comes before it."""

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
"""Types that a name without a type stands for, as in llama.cpp: the first that is there."""

MAX_LISTED = 12
"""Models that a hint lists."""

# Files beside models that are none: image encoders, calibration data, drafts.
_SIDECARS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_LABEL = re.compile(
    r"(?<![A-Z0-9])(?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4)"
    r"(?![A-Z0-9_])",
    re.IGNORECASE,
)


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
    """Hugging Face's hosts, and a mirror's."""
    try:
        mirror = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc.lower()
    except ValueError:  # who asks it says so
        mirror = ""
    return (*_HOSTS, mirror) if mirror else _HOSTS


def is_plain_path(path: str) -> bool:
    """Whether a relative path from a stranger stays where it is put and looks like itself.

    Its parts are names: none is empty, "." or "..", too long, or has a character that can't be
    printed; none means a drive or another folder to any system.
    """
    if not path.isprintable() or "\\" in path or PureWindowsPath(path).anchor:
        return False
    parts = path.split("/")
    return len(path.encode()) <= MAX_BYTES and all(map(_is_name, parts))


def _is_name(part: str) -> bool:
    return part not in ("", ".", "..") and len(part.encode()) <= MAX_PART_BYTES


def is_model_path(path: str) -> bool:
    """Whether a path ends in the name of a GGUF file, in any case."""
    name = path.rsplit("/", 1)[-1].lower()
    return name.endswith(".gguf") and name != ".gguf"


@dataclass(frozen=True)
class RepoFile:
    """One file of a repository.

    Attributes:
        path: in the repository, with "/" between folders.
        n_bytes: its size.
        digest: the cache's name for its bytes, in hexadecimal. It is the sha256 of a file in large
            file storage, and git's sha1 of any other; None where only the cache was looked at.
    """

    path: str
    n_bytes: int
    digest: str | None = None


@dataclass(frozen=True)
class RepoModel:
    """A model: one file, or all parts of a split one in order."""

    files: tuple[RepoFile, ...]

    @property
    def path(self) -> str:
        """The path of the file to open."""
        return self.files[0].path

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    @property
    def quant(self) -> str | None:
        """The type of the weights that the path tells, in capitals: "Q4_K_M"."""
        labels = _LABEL.findall(self.path)
        return labels[-1].upper() if labels else None

    @property
    def is_sidecar(self) -> bool:
        name = self.path.rsplit("/", 1)[-1].lower()
        return any(word in name for word in _SIDECARS)


def repo_models(files: Iterable[RepoFile]) -> list[RepoModel]:
    """The GGUF files, by path; a split model is there if all its parts are."""
    models = []
    parts: dict[tuple[str, int], dict[int, RepoFile]] = {}
    for file in files:
        if not is_model_path(file.path):
            continue
        split = split_name(file.path)
        if split is None:
            models.append(RepoModel((file,)))
        else:
            prefix, number, n_parts = split
            parts.setdefault((prefix, n_parts), {})[number] = file
    for (_, n_parts), there in parts.items():
        if len(there) == n_parts:
            models.append(RepoModel(tuple(there[number] for number in sorted(there))))
    return sorted(models, key=lambda model: model.path)


def model_names(repo: str, models: Sequence[RepoModel]) -> list[str]:
    """References that each mean one of these models, the short kind where it is enough."""
    count = Counter(model.quant for model in models if not model.is_sidecar)
    return [
        f"{repo}:{model.quant}"
        if model.quant and count[model.quant] == 1 and not model.is_sidecar
        else f"{repo}/{model.path}"
        for model in models
    ]


def matching(
    models: Sequence[RepoModel],
    reference: HubReference,
    default_quants: Sequence[str] = DEFAULT_QUANTS,
) -> list[RepoModel]:
    """The models that a reference can mean; one of them if it is clear.

    Without a type it means the first of `default_quants` that is there, else any model. Case does
    not matter.
    """
    if reference.file is not None:
        wanted = reference.file.lower()
        return [m for m in models if any(file.path.lower() == wanted for file in m.files)]
    usable = [model for model in models if not model.is_sidecar]
    if reference.quant is not None:
        return _of_quant(usable, reference.quant)
    for quant in default_quants:
        if found := _of_quant(usable, quant):
            return found
    return usable


def _of_quant(models: Sequence[RepoModel], quant: str) -> list[RepoModel]:
    exact = [model for model in models if model.quant == quant.upper()]
    if exact:
        return exact
    pattern = re.compile(rf"(?<![A-Z0-9_]){re.escape(quant)}(?=[./-])", re.IGNORECASE)
    return [model for model in models if pattern.search(model.path)]


def choose(models: Sequence[RepoModel], reference: HubReference, where: str) -> RepoModel:
    """The model that a reference means.

    Args:
        where: the place that was searched, for the message: "huggingface.co", "the cache".

    Raises:
        HubError: there is none, or several; the hint lists some of the files, with sizes.
    """
    found = matching(models, reference)
    if len(found) == 1:
        return found[0]
    if not models:
        raise HubError(
            f"{reference.repo} has no GGUF file in {where}",
            hint="repositories with files in this format often have names that end in -GGUF",
        )
    if not found and reference.file is not None:
        problem = f"{reference.repo} has no file {reference.file} in {where}"
    elif not found:
        problem = f"{reference} is not in {where}"
    else:
        problem = f"{reference} can mean {len(found)} models in {where}"
    names = zip(model_names(reference.repo, models), models, strict=True)
    meant = {model.path for model in found or models}
    named = [(name, model) for name, model in names if model.path in meant]
    raise HubError(problem, hint=f"there is {listed(named)}")


def listed(named: Iterable[tuple[str, RepoModel]]) -> str:
    """Names with sizes for a line, the smallest first; of many a few."""
    in_order = sorted(named, key=lambda item: item[1].n_bytes)
    shown = [
        f"{printable(name)} ({byte_size(model.n_bytes)})" for name, model in in_order[:MAX_LISTED]
    ]
    more = len(in_order) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
