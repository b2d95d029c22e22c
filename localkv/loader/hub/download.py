"""Fetches a model's files into the cache: resumed where it was interrupted, and verified.

Whatever has arrived stays in `blobs/DIGEST.incomplete` through cut connections, full disks and
killed processes; the next run asks for the rest only. huggingface_hub's own download deletes the
part when it is interrupted, asks for all bytes in the next run, and compares no checksum
(tests/loader/hub/test_library.py says when that changes), so the loop is here. The lock that
keeps two processes from fetching one file is the library's.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localkv.errors import HubError, byte_size, printable
from localkv.loader.hub.cache import (
    CachedModel,
    blob_path,
    cache_folder,
    cached_model,
    has_file,
    is_whole,
    link_blob,
    linked_folder,
    partial_path,
    set_revision,
    snapshot_folder,
)
from localkv.loader.hub.client import HubUnreachableError, open_file
from localkv.loader.hub.reference import HubReference, RepoFile, RepoModel

if TYPE_CHECKING:
    from io import FileIO

MAX_TRIES = 6
"""Requests in a row that bring nothing before a download is given up."""

FIRST_WAIT = 0.5
"""Seconds before the next request; twice as long after each that brings nothing."""

MIN_BYTES = 64 << 10
"""Bytes that a request has to bring to count as progress, unless fewer are missing."""

Advance = Callable[[int], None]
"""Called with bytes as they arrive; with a negative number if a file has to start over."""

_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class Download:
    """A model that is to be fetched, or completed.

    Attributes:
        reference: the request.
        commit: the revision of the repository, which stays the same to the end.
        model: all files of the model.
        missing: those whose bytes are not in the cache, at least not all.
        present_bytes: those that are there.
    """

    reference: HubReference
    commit: str
    model: RepoModel
    missing: tuple[RepoFile, ...]
    present_bytes: int

    @property
    def n_bytes(self) -> int:
        """The size of the missing files."""
        return sum(file.n_bytes for file in self.missing)


def plan_download(reference: HubReference, commit: str, model: RepoModel) -> Download:
    """Find the missing parts of a model, and whether there is room for them.

    Raises:
        HubError: the disk is too full.
    """
    repo = reference.repo
    with _disk_errors():
        missing = tuple(file for file in model.files if not has_file(repo, commit, file))
        present = sum(
            present_bytes(partial_path(repo, digest(file)), file.n_bytes) for file in missing
        )
        free = shutil.disk_usage(_existing(cache_folder())).free
    download = Download(reference, commit, model, missing, present)
    needed = download.n_bytes - present
    if needed > free:
        raise HubError(
            f"{model.path} needs {byte_size(needed)} more, {cache_folder()} has "
            f"{byte_size(free)} free",
            hint="localkv rm makes room; HF_HOME=FOLDER takes another disk",
        )
    return download


def fetch(download: Download, advance: Advance) -> CachedModel:
    """Fetch the missing parts and give the model its place in the cache.

    Raises:
        HubError: a server refuses, nothing arrives any more, the disk is full, or the bytes are not
            those that the repository announces, in which case they are deleted.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    repo, commit = download.reference.repo, download.commit
    revision = download.reference.revision
    with _disk_errors():
        if link := linked_folder(repo, revision, commit, download.model.files):
            raise HubError(
                f"{printable(link)} is a link, and nothing is fetched to its target",
                hint="move it elsewhere; HF_HOME=FOLDER takes another cache",
            )
        # There from the start: without it huggingface_hub takes the folder for damaged.
        snapshot_folder(repo, commit).mkdir(parents=True, exist_ok=True)
        for file in download.model.files:
            if file in download.missing:
                blob = blob_path(repo, digest(file))
                blob.parent.mkdir(parents=True, exist_ok=True)
                lock = cache_folder() / ".locks" / blob.parents[1].name / f"{blob.name}.lock"
                lock.parent.mkdir(parents=True, exist_ok=True)
                with WeakFileLock(lock):
                    if not is_whole(blob, file):  # another process can have been faster
                        _fetch_file(download, file, advance)
            link_blob(repo, commit, file)
        set_revision(repo, revision, commit)
    return cached_model(repo, commit, download.model)


def _fetch_file(download: Download, file: RepoFile, advance: Advance) -> None:
    repo = download.reference.repo
    with Partial(partial_path(repo, digest(file)), file) as partial:
        tries, most = 0, partial.n_bytes
        while partial.n_bytes < file.n_bytes:
            try:
                _receive(download, file, partial, advance)
            except HubUnreachableError:
                # Against the most there was: from a server without ranges a file starts over.
                tries = 0 if partial.n_bytes >= most + MIN_BYTES else tries + 1
                most = max(most, partial.n_bytes)
                if tries == MAX_TRIES:
                    raise
                time.sleep(FIRST_WAIT * 2**tries)
        if not partial.is_right():
            partial.delete()
            raise HubError(
                f"{file.path} is not the file that {repo} announces: another checksum",
                hint="nothing of it was kept; try again, and ask the authors if it fails again",
            )
        partial.move_to(blob_path(repo, digest(file)))


def _receive(download: Download, file: RepoFile, partial: Partial, advance: Advance) -> None:
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


# -- The part of a file that has arrived


def digest(file: RepoFile) -> str:
    """The digest of a file out of a listing."""
    assert file.digest is not None, "a file in a listing of the hub has one"
    return file.digest


def present_bytes(path: Path, n_bytes: int) -> int:
    """Bytes of a file that are there; 0 if they are of no use."""
    present = path.stat().st_size if path.is_file() else 0
    return present if present <= n_bytes else 0


class Partial:
    """A file that grows at its end.

    Args:
        path: where it is; an existing part is read for the checksum.
        file: the whole file.

    Attributes:
        n_bytes: the bytes that have arrived.

    Raises:
        OSError: it can't be read or written, or something else is in its place.
    """

    def __init__(self, path: Path, file: RepoFile) -> None:
        self._path = path
        self._file = file
        self._out = _open(path)
        self._start_checksum()
        self.n_bytes = 0
        try:
            while data := self._out.read(_READ_BYTES):
                self._checksum.update(data)
                self.n_bytes += len(data)
            if self.n_bytes > file.n_bytes:
                self.restart()
        except BaseException:
            self._out.close()
            raise

    def _start_checksum(self) -> None:
        if len(digest(self._file)) == hashlib.sha256().digest_size * 2:
            self._checksum = hashlib.sha256()
        else:  # git's name for a file that is not in large file storage
            self._checksum = hashlib.sha1(usedforsecurity=False)
            self._checksum.update(b"blob %d\0" % self._file.n_bytes)

    def append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:  # straight to the system, which keeps it even if this process dies
            rest = rest[self._out.write(rest) :]
        self._checksum.update(data)
        self.n_bytes += len(data)

    def restart(self) -> None:
        self._out.truncate(0)
        self._start_checksum()
        self.n_bytes = 0

    def is_right(self) -> bool:
        return self._checksum.hexdigest() == self._file.digest

    def delete(self) -> None:
        self._path.unlink()

    def move_to(self, path: Path) -> None:
        """Give it its place at once, so that no failure lets anybody see a part of it."""
        os.fsync(self._out.fileno())  # before its name, in case the machine goes down
        self._out.close()
        self._path.replace(path)

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()


def _open(path: Path) -> FileIO:
    """A file to read and append to, made if it is not there; through no link, and no pipe."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
        flags |= getattr(os, name, 0)
    file = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    return os.fdopen(file, "r+b", buffering=0)


# -- Errors of the disk


@contextmanager
def _disk_errors() -> Iterator[None]:
    """The cache can't be read or written: one line with its place and a remedy."""
    try:
        yield
    except OSError as error:
        raise HubError(*_told(error)) from error


def _told(error: OSError) -> tuple[str, str]:
    folder = printable(cache_folder())
    what = error.strerror or printable(str(error))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{folder}: the disk is full; the part that has arrived is kept",
            "localkv rm makes room; HF_HOME=FOLDER takes another disk",
        )
    if error.errno == errno.EFBIG:
        return (
            f"{folder}: no file may be that large; the part that has arrived is kept",
            "ulimit -f is the limit of a shell; HF_HOME=FOLDER takes another disk",
        )
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOTEMPTY):
        name = (
            folder if error.filename is None else printable(str(error.filename2 or error.filename))
        )
        return (
            f"{name} is in the way of the download: {what}",
            "move it elsewhere; HF_HOME=FOLDER takes another cache",
        )
    return f"{folder}: {what}", "HF_HOME=FOLDER takes another cache"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())
