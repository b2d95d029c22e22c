"""What Hugging Face's cache on this machine holds, and how a file gets in and out.

The layout is huggingface_hub's, shared with every other program: `models--ORG--REPO/` with `blobs/`
(the bytes, named by their digest), `snapshots/COMMIT/` (links to blobs under the files' own names)
and `refs/` (the commit of a branch). HF_HOME and HF_HUB_CACHE say where it is.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localkv.errors import HubError, byte_size
from localkv.loader.hub.reference import DEFAULT_REVISION, HubReference
from localkv.loader.hub.repo_model import (
    RepoFile,
    RepoModel,
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
        folder: that of the snapshot they are in.
    """

    name: str
    model: RepoModel
    folder: Path

    @property
    def path(self) -> Path:
        """The file to open."""
        return self.folder / self.model.path

    @property
    def modified(self) -> float:
        """When its bytes arrived, in seconds since 1970."""
        return self.path.stat().st_mtime


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


def has_file(repo: str, commit: str, file: RepoFile) -> bool:
    """Whether a file's bytes are there, under its name or not."""
    assert file.digest is not None
    return blob_path(repo, file.digest).exists() or _file_path(repo, commit, file).exists()


def link_blob(repo: str, commit: str, file: RepoFile) -> None:
    """Give a blob its file's name in a snapshot; where links are not possible, move it there."""
    assert file.digest is not None
    blob = blob_path(repo, file.digest)
    name = _file_path(repo, commit, file)
    if name.exists():
        return
    name.parent.mkdir(parents=True, exist_ok=True)
    name.unlink(missing_ok=True)  # a link to nothing
    try:
        name.symlink_to(os.path.relpath(blob, name.parent))
    except (NotImplementedError, OSError):
        blob.replace(name)


def _file_path(repo: str, commit: str, file: RepoFile) -> Path:
    return snapshot_folder(repo, commit) / file.path


def set_revision(repo: str, revision: str, commit: str) -> None:
    """Remember which commit a branch or tag is."""
    if revision != commit:
        ref = repo_folder(repo) / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)


def cached_models(repo: str | None = None) -> list[CachedModel]:
    """The models in the cache, of all repositories or of one; the newest copy of each."""
    if repo is not None:
        return _models_of(repo)
    found = []
    for folder in sorted(cache_folder().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/")
        if repo.count("/") == 1:
            found += _models_of(repo)
    return found


def cached_model(repo: str, commit: str, model: RepoModel) -> CachedModel:
    """One that is known to be there."""
    found = _models_of(repo, first=commit)
    return next(item for item in found if item.model.path == model.path)


def _models_of(repo: str, first: str | None = None) -> list[CachedModel]:
    """The models of a repository, of its snapshots in order of preference."""
    found: dict[str, tuple[RepoModel, Path]] = {}
    for folder in _snapshots(repo, first):
        files = [
            RepoFile(path.relative_to(folder).as_posix(), path.stat().st_size)
            for path in folder.rglob("*")
            if path.suffix.lower() == ".gguf" and path.is_file()
        ]
        for model in repo_models(files):
            found.setdefault(model.path, (model, folder))
    names = model_names(repo, [model for model, _ in found.values()])
    return [CachedModel(name, *item) for name, item in zip(names, found.values(), strict=True)]


def _snapshots(repo: str, first: str | None) -> list[Path]:
    """The snapshots of a repository: that of the main branch before the others, newest first."""
    try:
        folders = list((repo_folder(repo) / "snapshots").iterdir())
    except OSError:
        return []
    if first is None:
        with suppress(OSError):
            first = (repo_folder(repo) / "refs" / DEFAULT_REVISION).read_text().strip()
    return sorted(folders, key=lambda f: (f.name == first, f.stat().st_mtime), reverse=True)


@dataclass(frozen=True)
class Removal:
    """What is to be deleted.

    Attributes:
        repo: of which repository.
        models: whole models.
        partial_bytes: of interrupted downloads, which go if no model stays.
    """

    repo: str
    models: tuple[CachedModel, ...]
    partial_bytes: int

    @property
    def n_bytes(self) -> int:
        return sum(item.model.n_bytes for item in self.models) + self.partial_bytes


def plan_removal(reference: HubReference) -> Removal:
    """Find what a reference means in the cache; without a type, the only model of its repository.

    Raises:
        HubError: nothing, or more than one model.
    """
    models = cached_models(reference.repo)
    meant = matching([item.model for item in models], reference, default_quants=())
    found = [item for item in models if item.model in meant]
    if len(found) > 1 or (models and not found):
        problem = f"can mean {len(found)} models in" if found else "is not in"
        listed = ", ".join(f"{i.name} ({byte_size(i.model.n_bytes)})" for i in found or models)
        raise HubError(f"{reference} {problem} the cache", hint=f"there is {listed}")
    partial = 0
    if len(models) == len(found):
        partials = (repo_folder(reference.repo) / "blobs").glob("*.incomplete")
        partial = sum(path.stat().st_size for path in partials)
    if not found and not partial:
        raise HubError(
            f"{reference} is not in the cache ({cache_folder()})",
            hint="localkv list -q prints what is there",
        )
    return Removal(reference.repo, tuple(found), partial)


def remove(removal: Removal) -> None:
    """Delete the files of all snapshots under those names, and bytes that no other name has.

    Raises:
        HubError: the repository's folder is not as huggingface_hub expects it.
    """
    from huggingface_hub import scan_cache_dir

    folder = repo_folder(removal.repo)
    cache = scan_cache_dir(folder.parent)
    repo = next((r for r in cache.repos if r.repo_path.name == folder.name), None)
    if repo is None:
        raise HubError(f"{folder} is damaged", hint="delete the folder yourself")
    paths = {file.path for item in removal.models for file in item.model.files}
    doomed = [
        file
        for revision in repo.revisions
        for file in revision.files
        if file.file_path.relative_to(revision.snapshot_path).as_posix() in paths
    ]
    if len(doomed) == sum(len(revision.files) for revision in repo.revisions):
        commits = [revision.commit_hash for revision in repo.revisions]
        cache.delete_revisions(*commits).execute()  # takes the repository's folder along
    else:
        cache.delete_files(*doomed).execute()
        for path in folder.joinpath("blobs").glob("*.incomplete") if removal.partial_bytes else ():
            path.unlink(missing_ok=True)
