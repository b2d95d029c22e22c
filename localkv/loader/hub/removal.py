"""Deletes models from Hugging Face's cache, and nothing outside of it, wherever links may lead."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from localkv.errors import HubError, printable
from localkv.loader.hub.cache import (
    CachedModel,
    cache_folder,
    cached_models,
    files_in,
    repo_folder,
)
from localkv.loader.hub.reference import HubReference
from localkv.loader.hub.repo_model import listed, matching


@dataclass(frozen=True)
class Removal:
    """The files to delete.

    Attributes:
        repo: their repository.
        models: whole models.
        partial_bytes: of interrupted downloads, in part or without a name yet, which go if no
            model stays.
    """

    repo: str
    models: tuple[CachedModel, ...]
    partial_bytes: int

    @property
    def n_bytes(self) -> int:
        return sum(item.model.n_bytes for item in self.models) + self.partial_bytes


def plan_removal(reference: HubReference) -> Removal:
    """Find a reference's files in the cache; without a type, the only model of its repository.

    Raises:
        HubError: nothing, or more than one model.
    """
    models = cached_models(reference.repo)
    meant = matching([item.model for item in models], reference, default_quants=())
    paths = {model.path for model in meant}
    found = [item for item in models if item.model.path in paths]
    if len(found) > 1 or (models and not found):
        problem = f"can mean {len(found)} models in" if found else "is not in"
        there = listed((item.name, item.model) for item in found or models)
        raise HubError(f"{reference} {problem} the cache", hint=f"there is {there}")
    partial = 0
    if len(models) == len(found):
        partial = sum(_size(path) for path in _nameless(repo_folder(reference.repo)))
    if not found and not partial:
        raise HubError(
            f"{reference} is not in the cache ({printable(cache_folder())})",
            hint="localkv list -q prints the names",
        )
    return Removal(reference.repo, tuple(found), partial)


def remove(removal: Removal) -> None:
    """Delete the files of all snapshots under those names, and bytes that no other name has.

    Raises:
        HubError: something of it lies outside of the cache, or can't be deleted.
    """
    folder = repo_folder(removal.repo)
    try:
        _check_inside(folder)
        snapshots = folder / "snapshots"
        names = list(files_in(snapshots, strict=True)) if snapshots.exists() else []
        paths = {file.path for item in removal.models for file in item.model.files}
        doomed = {name for name in names if _path_in_snapshot(folder, name) in paths}
        if len(doomed) == len(names):
            _delete(repos={folder})
            return
        kept = {_blob_of(folder, name) for name in names if name not in doomed}
        blobs = {blob for name in doomed if (blob := _blob_of(folder, name)) is not None}
        nameless = _nameless(folder) if removal.partial_bytes else set()
        doomed_blobs = blobs - kept | nameless
        for path in filter(_is_special, doomed_blobs):
            path.unlink()  # huggingface_hub would open a pipe, and wait for ever
        _delete(names=doomed, blobs=doomed_blobs)
    except RecursionError as error:
        raise HubError(
            f"{printable(folder)} has folders that are nested too deeply to delete",
            hint="delete the folder yourself",
        ) from error
    except OSError as error:
        name = printable(str(error.filename or folder))
        raise HubError(f"{name} can't be deleted: {error.strerror or error}") from error


def _check_inside(folder: Path) -> None:
    """Whether a repository's folders are where they seem to be."""
    for path in (folder, folder / "snapshots", folder / "blobs"):
        if path.is_symlink():
            raise HubError(
                f"{printable(path)} is a link, and its target is left alone",
                hint="delete it yourself",
            )


def _nameless(folder: Path) -> set[Path]:
    """Files in the store of a repository that none of its snapshots has."""
    named = {_blob_of(folder, name) for name in files_in(folder / "snapshots")}
    return {path for path in files_in(folder / "blobs") if path not in named}


def _is_special(path: Path) -> bool:
    """Whether a path is neither a file, a folder nor a link, but a pipe or the like."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _path_in_snapshot(folder: Path, name: Path) -> str:
    """A file's path in the repository: without `snapshots/COMMIT/`."""
    return "/".join(name.relative_to(folder).parts[2:])


def _blob_of(folder: Path, name: Path) -> Path | None:
    """The blob of this repository that a link leads to; None if it leads elsewhere."""
    if not name.is_symlink():
        return None
    blob = Path(os.path.normpath(name.parent / os.readlink(name)))
    return blob if blob.parent == folder / "blobs" else None


def _delete(
    *,
    repos: set[Path] | None = None,
    names: set[Path] | None = None,
    blobs: set[Path] | None = None,
) -> None:
    """Delete through huggingface_hub, which knows of blobs that repositories share."""
    from huggingface_hub import DeleteCacheStrategy
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its failures are reported below
    paths = [frozenset(group or ()) for group in (repos, names, blobs)]
    DeleteCacheStrategy(
        expected_freed_size=0,
        repos=paths[0],
        files=paths[1],
        blobs=paths[2],
        refs=frozenset(),
        snapshots=frozenset(),
        cache_dir=cache_folder(),
    ).execute()
    for path in frozenset().union(*paths):
        if os.path.lexists(path):
            raise HubError(f"{printable(path)} can't be deleted", hint="check who may write there")
