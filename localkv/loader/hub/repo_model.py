"""From a repository's files to its models, and to the one that a reference means.

Used both for a repository's files on Hugging Face and for those in the cache.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from localkv.errors import HubError, byte_size, printable
from localkv.loader.hub.plain_path import is_model_path
from localkv.loader.hub.reference import HubReference
from localkv.loader.split_name import split_name

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
class RepoFile:
    """One file of a repository.

    Attributes:
        path: in the repository, with "/" between folders.
        n_bytes: its size.
        digest: the cache's name for its bytes, in hexadecimal: the sha256 of a file in large
            file storage, git's sha1 of any other; None where only the cache was looked at.
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
