"""Fetches a model's files into the cache: resumed where it was interrupted, and verified.

Whatever has arrived stays in `blobs/DIGEST.incomplete` through cut connections, full disks and
killed processes; the next run asks for the rest only. huggingface_hub's own download starts over in
a new process and compares no checksum, so the loop is here; requests and errors are in `client`.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from localkv.errors import HubError, byte_size
from localkv.loader.hub.cache import (
    CachedModel,
    blob_path,
    cache_folder,
    cached_model,
    has_file,
    link_blob,
    partial_path,
    set_revision,
    snapshot_folder,
)
from localkv.loader.hub.client import HubUnreachableError, open_file
from localkv.loader.hub.reference import HubReference
from localkv.loader.hub.repo_model import RepoFile, RepoModel

MAX_TRIES = 6
"""Requests in a row that bring nothing before a download is given up."""

FIRST_WAIT = 0.5
"""Seconds before the next request; twice as long after each that brings nothing."""

_READ_BYTES = 1 << 22

Advance = Callable[[int], None]
"""Told of bytes as they arrive; of less than none if a file has to start over."""


@dataclass(frozen=True)
class Download:
    """A model that is to be fetched, or completed.

    Attributes:
        reference: what was asked for.
        commit: the revision of the repository, which stays the same to the end.
        model: all files of the model.
        missing: those whose bytes are not in the cache, at least not all.
        present_bytes: what there is of these.
    """

    reference: HubReference
    commit: str
    model: RepoModel
    missing: tuple[RepoFile, ...]
    present_bytes: int

    @property
    def n_bytes(self) -> int:
        """Of the missing files."""
        return sum(file.n_bytes for file in self.missing)


def plan_download(reference: HubReference, commit: str, model: RepoModel) -> Download:
    """Find out what of a model is missing, and whether there is room for it.

    Raises:
        HubError: the disk is too full.
    """
    repo = reference.repo
    missing = tuple(file for file in model.files if not has_file(repo, commit, file))
    present = 0
    for file in missing:
        partial = partial_path(repo, _digest(file))
        present += min(partial.stat().st_size, file.n_bytes) if partial.exists() else 0
    download = Download(reference, commit, model, missing, present)
    needed = download.n_bytes - present
    free = shutil.disk_usage(_existing(cache_folder())).free
    if needed > free:
        raise HubError(
            f"{model.path} needs {byte_size(needed)} more, {cache_folder()} has "
            f"{byte_size(free)} free",
            hint="localkv rm makes room; HF_HOME=FOLDER takes another disk",
        )
    return download


def fetch(download: Download, advance: Advance) -> CachedModel:
    """Fetch what is missing and give the model its place in the cache.

    Raises:
        HubError: a server refuses, nothing arrives any more, the disk is full, or the bytes are not
            those that the repository announces, in which case they are deleted.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    repo, commit = download.reference.repo, download.commit
    with _disk_errors():
        # There from the start: without it huggingface_hub takes the folder for damaged.
        snapshot_folder(repo, commit).mkdir(parents=True, exist_ok=True)
        for file in download.model.files:
            if file in download.missing:
                blob = blob_path(repo, _digest(file))
                blob.parent.mkdir(parents=True, exist_ok=True)
                lock = cache_folder() / ".locks" / blob.parents[1].name / f"{blob.name}.lock"
                lock.parent.mkdir(parents=True, exist_ok=True)
                with WeakFileLock(lock):
                    if not blob.exists():  # another process can have been faster
                        _fetch_file(download, file, advance)
            link_blob(repo, commit, file)
        set_revision(repo, download.reference.revision, commit)
    return cached_model(repo, commit, download.model)


def _fetch_file(download: Download, file: RepoFile, advance: Advance) -> None:
    repo = download.reference.repo
    path = partial_path(repo, _digest(file))
    with _Partial(path, file) as partial:
        tries = 0
        while partial.n_bytes < file.n_bytes:
            before = partial.n_bytes
            try:
                _receive(download, file, partial, advance)
            except HubUnreachableError:
                tries = 0 if partial.n_bytes > before else tries + 1
                if tries == MAX_TRIES:
                    raise
                time.sleep(FIRST_WAIT * 2**tries)
        if not partial.is_right():
            path.unlink()
            raise HubError(
                f"{file.path} is not what {repo} announces: another checksum",
                hint="nothing of it was kept; try again, and ask the authors if it fails again",
            )
    path.replace(blob_path(repo, _digest(file)))


def _receive(download: Download, file: RepoFile, partial: _Partial, advance: Advance) -> None:
    """One request for the rest of a file."""
    start = partial.n_bytes
    with open_file(download.reference, download.commit, file, start) as (is_rest, pieces):
        if start and not is_rest:
            partial.restart()
            advance(-start)
        for piece in pieces:
            partial.append(piece)
            advance(len(piece))
            if partial.n_bytes > file.n_bytes:
                break  # the checksum will say that it is another file
    if partial.n_bytes < file.n_bytes:
        raise HubUnreachableError(f"the connection ended within {file.path}")


class _Partial:
    """What has arrived of a file, on disk, and its checksum so far."""

    def __init__(self, path: Path, file: RepoFile) -> None:
        self._path = path
        self._file = file
        self._out: BinaryIO = path.open("ab")
        self._start_checksum()
        self.n_bytes = 0
        with path.open("rb") as present:
            while data := present.read(_READ_BYTES):
                self._checksum.update(data)
                self.n_bytes += len(data)
        if self.n_bytes > file.n_bytes:
            self.restart()

    def _start_checksum(self) -> None:
        if len(_digest(self._file)) == hashlib.sha256().digest_size * 2:
            self._checksum = hashlib.sha256()
        else:  # git's name for a file that is not in large file storage
            self._checksum = hashlib.sha1(usedforsecurity=False)
            self._checksum.update(b"blob %d\0" % self._file.n_bytes)

    def append(self, data: bytes) -> None:
        self._out.write(data)
        self._out.flush()  # the system keeps it, whatever becomes of this process
        self._checksum.update(data)
        self.n_bytes += len(data)

    def restart(self) -> None:
        self._out.truncate(0)
        self._start_checksum()
        self.n_bytes = 0

    def is_right(self) -> bool:
        return self._checksum.hexdigest() == self._file.digest

    def __enter__(self) -> _Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()


@contextmanager
def _disk_errors() -> Iterator[None]:
    """The cache can't be written: one line that says where it is."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "the disk is full; what has arrived is kept"
        raise HubError(
            f"{cache_folder()}: {what}",
            hint="localkv rm makes room; HF_HOME=FOLDER takes another disk",
        ) from error


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _digest(file: RepoFile) -> str:
    assert file.digest is not None, "a file in a listing of the hub has one"
    return file.digest
