"""Hugging Face's cache on this machine: its content, and how a file gets in.

The layout is huggingface_hub's, shared with every other program: `models--ORG--REPO/` with `blobs/`
(the bytes, named by their digest), `snapshots/COMMIT/` (links to blobs under the files' own names)
and `refs/` (the commit of a branch). HF_HOME and HF_HUB_CACHE say where it is.

Other programs write to it, so anything may be there: entries that can't be read or are none of
the above are passed over.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident

from localkv.errors import HubError
from localkv.loader.hub.plain_path import is_model_path
from localkv.loader.hub.reference import DEFAULT_REVISION, is_repo
from localkv.loader.hub.repo_model import RepoFile, RepoModel, model_names, repo_models


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache, whole.

    Attributes:
        name: a reference that means it: "org/repo:Q8_0".
        model: its files.
        folder: that of the snapshot they are in.
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
    """The snapshots of a repository: that of the main branch before the others, newest first."""
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
