"""Hugging Face's cache on this machine: what is in it, how a file gets in, and how it goes.

The layout is huggingface_hub's, shared with every other program: `models--ORG--REPO/` with `blobs/`
(the bytes, named by their digest), `snapshots/COMMIT/` (links to blobs under the files' own names)
and `refs/` (the commit of a branch). HF_HOME and HF_HUB_CACHE say where it is.

Other programs write to it, so anything may be there: entries that can't be read or are none of
the above are passed over. huggingface_hub's scan passes over the whole repository then, and reads
all repositories to find one, so the search is here. The library deletes, as it knows of blobs that
repositories share. What it deletes is decided here: nothing outside of the cache, wherever links
lead.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident

from localkv.errors import HubError, printable
from localkv.loader.hub.reference import (
    DEFAULT_REVISION,
    HubReference,
    RepoFile,
    RepoModel,
    is_model_path,
    is_repo,
    listed,
    matching,
    model_names,
    repo_models,
)


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache, whole.

    Attributes:
        name: a reference that means it: "org/repo:Q8_0".
        model: its files.
        folder: the snapshot that they are in.
        modified: when the bytes of its first file arrived, in seconds since 1970.
    """

    name: str
    model: RepoModel
    folder: Path
    modified: float

    @property
    def path(self) -> Path:
        """The file to open."""
        return self.folder / self.model.path


def cache_folder() -> Path:
    """Where the cache is, if there is one."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repo_folder(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def blob_path(repo: str, digest: str) -> Path:
    """Where the bytes of a file belong."""
    return repo_folder(repo) / "blobs" / digest


def partial_path(repo: str, digest: str) -> Path:
    """Where they are while they arrive."""
    return repo_folder(repo) / "blobs" / f"{digest}.incomplete"


def snapshot_folder(repo: str, commit: str) -> Path:
    return repo_folder(repo) / "snapshots" / commit


def linked_folder(repo: str, revision: str, commit: str, files: Iterable[RepoFile]) -> Path | None:
    """A folder of a repository that is a link, so that files put there would lie elsewhere."""
    folder = repo_folder(repo)
    ref = folder / "refs" / revision
    places = {folder / "blobs", ref.parent, snapshot_folder(repo, commit)}
    places |= {_file_path(repo, commit, file).parent for file in files}
    places |= {above for place in places for above in place.parents if folder in above.parents}
    return next((place for place in sorted(places) if place.is_symlink()), None)


def is_whole(path: Path, file: RepoFile) -> bool:
    """Whether there is a file of the right size. Only verified files have names."""
    return path.is_file() and path.stat().st_size == file.n_bytes


def has_file(repo: str, commit: str, file: RepoFile) -> bool:
    """Whether a file's bytes are there, under its name or not."""
    assert file.digest is not None
    return is_whole(blob_path(repo, file.digest), file) or is_whole(
        _file_path(repo, commit, file), file
    )


def link_blob(repo: str, commit: str, file: RepoFile) -> None:
    """Give a blob its file's name in a snapshot; where links are not possible, move it there."""
    assert file.digest is not None
    blob = blob_path(repo, file.digest)
    name = _file_path(repo, commit, file)
    if is_whole(name, file):
        return
    name.parent.mkdir(parents=True, exist_ok=True)
    link = _aside(repo, "link")
    try:
        link.symlink_to(os.path.relpath(blob, name.parent))
    except (NotImplementedError, PermissionError):
        blob.replace(name)
    else:
        _replace(link, name)


def _file_path(repo: str, commit: str, file: RepoFile) -> Path:
    return snapshot_folder(repo, commit) / file.path


def set_revision(repo: str, revision: str, commit: str) -> None:
    """Remember which commit a branch or tag is."""
    if revision != commit:
        ref = repo_folder(repo) / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        written = _aside(repo, "ref")
        written.write_text(commit)
        _replace(written, ref)


def _aside(repo: str, kind: str) -> Path:
    """Where this process makes files that it then moves to their places at once."""
    path = repo_folder(repo) / "blobs" / f"{os.getpid()}-{get_ident()}.{kind}"
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    return path


def _replace(path: Path, place: Path) -> None:
    try:
        path.replace(place)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def cached_models(repo: str | None = None) -> list[CachedModel]:
    """The models in the cache, of all repositories or of one; the newest copy of each."""
    if repo is not None:
        return _models_of(repo)
    found = []
    for repo in _repos():
        found += _models_of(repo)
    return found


def _repos() -> list[str]:
    """The repositories of models whose names the hub can have."""
    names = []
    with suppress(OSError):
        names = sorted(entry.name for entry in os.scandir(cache_folder()))
    repos = [n.removeprefix("models--").replace("--", "/") for n in names if n[:8] == "models--"]
    return [repo for repo in repos if is_repo(repo)]


def cached_name(path: Path) -> str | None:
    """The name ORG/REPO/FILE of a file in any cache of Hugging Face's."""
    parts = path.absolute().parts
    for i, part in enumerate(parts[:-3]):
        repo = part.removeprefix("models--").replace("--", "/")
        if part.startswith("models--") and parts[i + 1] == "snapshots" and is_repo(repo):
            return "/".join((repo, *parts[i + 3 :]))
    return None


def cached_model(repo: str, commit: str, model: RepoModel) -> CachedModel:
    """One that has just been there.

    Raises:
        HubError: another program has deleted it.
    """
    for item in _models_of(repo, first=commit):
        if item.model.path == model.path:
            return item
    raise HubError(f"{repo}/{model.path} is no longer in the cache", hint="run the command again")


def _models_of(repo: str, first: str | None = None) -> list[CachedModel]:
    """The models of a repository, of its snapshots in order of preference."""
    found: dict[str, tuple[RepoModel, Path, float]] = {}
    for folder in _snapshots(repo, first):
        modified = {}
        files = []
        for path, about in _model_files(folder):
            files.append(RepoFile(path, about.st_size))
            modified[path] = about.st_mtime
        for model in repo_models(files):
            found.setdefault(model.path, (model, folder, modified[model.path]))
    names = model_names(repo, [model for model, *_ in found.values()])
    return [CachedModel(name, *item) for name, item in zip(names, found.values(), strict=True)]


def _model_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    for path in files_in(folder):
        if is_model_path(path.name):
            with suppress(OSError):  # a link to nothing, or in a circle
                about = path.stat()
                if stat.S_ISREG(about.st_mode):
                    yield path.relative_to(folder).as_posix(), about


def files_in(folder: Path, *, strict: bool = False) -> Iterator[Path]:
    """All that is in a folder and is no folder itself, links too, which are not followed.

    Raises:
        OSError: a folder can't be read; if not `strict` it counts as an empty one.
    """
    folders = [folder]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(folder / entry.name)
                    else:
                        yield folder / entry.name
        except OSError:
            if strict:
                raise


def _snapshots(repo: str, first: str | None) -> list[Path]:
    """The snapshots of a repository: the main branch's before the others, newest first."""
    first = first or _main_commit(repo)
    found = []
    with suppress(OSError), os.scandir(repo_folder(repo) / "snapshots") as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found.append((entry.name == first, entry.stat().st_mtime, Path(entry.path)))
    return [path for *_, path in sorted(found, reverse=True)]


def _main_commit(repo: str) -> str | None:
    """The commit of the main branch, as another program or localkv noted it."""
    ref = repo_folder(repo) / "refs" / DEFAULT_REVISION
    try:
        if not ref.is_file():
            return None
        with ref.open("rb") as file:
            return file.read(100).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None


def partial_bytes() -> int:
    """Bytes of interrupted downloads of all repositories."""
    total = 0
    for repo in _repos():
        for path in files_in(repo_folder(repo) / "blobs"):
            if path.suffix == ".incomplete":
                with suppress(OSError):
                    total += path.lstat().st_size
    return total


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
