"""Model shelves: the folders `models/` of the working directory and of localkv itself."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from localkv.loader.hub.repo_model import RepoFile, RepoModel, repo_models
from localkv.loader.shipped_model import own_shelves


def shelves() -> list[Path]:
    """The shelves that exist, each once."""
    found: dict[Path, Path] = {}
    for folder in (Path("models"), *own_shelves()):
        if folder.is_dir():
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def models_on(shelf: Path) -> list[RepoModel]:
    """The models of a shelf, with paths relative to it."""
    files = []
    with suppress(OSError):  # a folder that can't be read has none
        for path in shelf.iterdir():
            with suppress(OSError):  # a link to nothing, or in a circle
                if path.is_file():
                    files.append(RepoFile(path.name, path.stat().st_size))
    return [model for model in repo_models(files) if not model.is_sidecar]
