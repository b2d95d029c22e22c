"""The models on this machine: the one that ships, those on shelves, and the hub cache's.

A shelf is a folder `models/`, of the working directory or of localkv itself.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localkv.loader.hub.reference import RepoModel

PACKAGE = Path(__file__).parents[1]
SHIPPED = "tales-4M-Q8_0.gguf"


def shipped_model() -> Path | None:
    """The file of the model that comes with localkv; None if this copy has none."""
    files = (folder / SHIPPED for folder in own_shelves())
    return next((file for file in files if file.is_file()), None)


def own_shelves() -> list[Path]:
    """Folders of models: an installed package has one inside, a checkout has one beside it."""
    own = [PACKAGE / "models"]
    if (PACKAGE.parent / "pyproject.toml").exists():  # beside an installed one are other packages
        own.append(PACKAGE.parent / "models")
    return own


def shelves() -> list[Path]:
    """The shelves that exist, each once."""
    found: dict[Path, Path] = {}
    for folder in (Path("models"), *own_shelves()):
        if folder.is_dir():
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def models_on(shelf: Path) -> list[RepoModel]:
    """The models of a shelf, with paths relative to it."""
    from localkv.loader.hub.reference import RepoFile, repo_models

    files = []
    with suppress(OSError):  # a folder that can't be read has none
        for path in shelf.iterdir():
            with suppress(OSError):  # a link to nothing, or in a circle
                if path.is_file():
                    files.append(RepoFile(path.name, path.stat().st_size))
    return [model for model in repo_models(files) if not model.is_sidecar]


def models_below(folder: Path) -> dict[str, Path]:
    """The models in a folder and in the folders in it, by the names that llama-server gives them:
    a file's without ".gguf", or its folder's."""
    found = {Path(one.path).stem: folder / one.path for one in models_on(folder)}
    with suppress(OSError):
        for inner in sorted(folder.iterdir()):
            models = models_on(inner) if inner.is_dir() else []
            for one in models:
                name = inner.name if len(models) == 1 else f"{inner.name}/{Path(one.path).stem}"
                found.setdefault(name, inner / one.path)
    return found


@dataclass(frozen=True)
class LocalModel:
    """A model that is there.

    Attributes:
        name: a path, or a reference such as "org/repo:Q8_0"; `-m` takes either.
        path: the file to open.
        n_bytes: size of all its files.
        modified: when, in seconds since 1970.
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
    from localkv.loader.hub.cache import cached_models

    found = []
    for folder in shelves():
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
    for model in models_on(folder):
        path = folder / model.path
        with suppress(OSError):  # deleted meanwhile
            found.append(LocalModel(str(path), path, model.n_bytes, path.stat().st_mtime))
    return found
