"""The models on this machine: those on the shelves, and those in Hugging Face's cache."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localkv.loader import shelf
from localkv.loader.hub.cache import cached_models


@dataclass(frozen=True)
class LocalModel:
    """A model that is there.

    Attributes:
        name: a path, or a reference such as "org/repo:Q8_0"; `-m` takes either.
        path: the file to open.
        n_bytes: of all its files.
        modified: in seconds since 1970.
    """

    name: str
    path: Path
    n_bytes: int
    modified: float


def local_models(beside: Path | None = None) -> list[LocalModel]:
    """The models on the shelves, then those in the cache, each by name.

    Args:
        beside: a file; the other models in its folder come first, unless they are listed anyway.
    """
    found = []
    for folder in shelf.shelves():
        found += _in_folder(folder)
    for item in cached_models():
        if not item.model.is_sidecar:
            found.append(LocalModel(item.name, item.path, item.model.n_bytes, item.modified))
    if beside is None:
        return found
    known = {model.path.resolve() for model in found}
    near = [one for one in _in_folder(beside.parent) if one.path.resolve() not in known]
    return [*near, *found]


def _in_folder(folder: Path) -> list[LocalModel]:
    found = []
    for model in shelf.models_on(folder):
        path = folder / model.path
        with suppress(OSError):  # deleted meanwhile
            found.append(LocalModel(str(path), path, model.n_bytes, path.stat().st_mtime))
    return found
