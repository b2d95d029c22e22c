"""A hub's listing of a repository, believed only where it can be true.

Everything that is read from a listing passes through here, so that names, sizes and digests are
what the rest of the package takes them for.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from localkv.errors import quoted
from localkv.loader.hub.plain_path import is_model_path, is_plain_path
from localkv.loader.hub.repo_model import RepoFile

MAX_FILES = 10_000
"""GGUF files of a repository."""

MAX_FILE_BYTES = 1 << 50

_SHORT = reprlib.Repr()
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class NonsenseError(Exception):
    """An answer that no hub gives; the message names the error in it, in one line."""


@dataclass(frozen=True)
class Listing:
    """The GGUF files of a repository at one commit.

    Attributes:
        commit: 40 hexadecimal digits.
        files: with digests; names and sizes are such that they can be laid out in a folder.
    """

    commit: str
    files: tuple[RepoFile, ...]


def read_listing(body: bytes) -> Listing:
    """Read the JSON of a repository.

    Raises:
        NonsenseError: it is no JSON, or something in it can't be true.
    """
    try:
        listing = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NonsenseError("it is not JSON") from error
    if not isinstance(listing, dict):
        raise NonsenseError("it is not an object")
    siblings = listing.get("siblings")
    if not isinstance(siblings, list):
        raise NonsenseError("it has no list of files")
    files = [file for file in map(_file, siblings) if file is not None]
    _check_together(files)
    return Listing(_text(listing.get("sha"), _COMMIT.fullmatch, "the commit"), tuple(files))


def _file(sibling: Any) -> RepoFile | None:
    """A file of the list, or None if it is none of ours."""
    if not isinstance(sibling, dict):
        raise NonsenseError(f"a file is {_shown(sibling)}")
    path = _text(sibling.get("rfilename"), None, "the name of a file")
    if not path.lower().endswith(".gguf"):
        return None
    if not (is_plain_path(path) and is_model_path(path)):
        raise NonsenseError(f"a file is called {quoted(path)}")
    lfs = sibling.get("lfs")
    if lfs is None:
        size = _size(sibling.get("size"), path)
        return RepoFile(path, size, _digest(sibling.get("blobId"), _SHA1, path))
    if not isinstance(lfs, dict):
        raise NonsenseError(f"the storage of {quoted(path)} is {_shown(lfs)}")
    size = _size(lfs.get("size"), path)
    if sibling.get("size") is not None and _size(sibling["size"], path) != size:
        raise NonsenseError(f"{quoted(path)} has two sizes")
    return RepoFile(path, size, _digest(lfs.get("sha256"), _SHA256, path))


def _check_together(files: list[RepoFile]) -> None:
    """Whether the files can be in one folder, and their bytes in one store."""
    if len(files) > MAX_FILES:
        raise NonsenseError(f"{len(files)} GGUF files, more than {MAX_FILES}")
    paths: set[str] = set()
    sizes: dict[str | None, int] = {}
    for file in files:
        if file.path in paths:
            raise NonsenseError(f"{quoted(file.path)} is there twice")
        paths.add(file.path)
        if sizes.setdefault(file.digest, file.n_bytes) != file.n_bytes:
            raise NonsenseError(f"{quoted(file.path)} has another file's checksum")
    for path in paths:
        if folder := next((folder for folder in _folders(path) if folder in paths), None):
            raise NonsenseError(f"{quoted(folder)} is a file and a folder")


def _folders(path: str) -> Iterable[str]:
    return (path[:i] for i, c in enumerate(path) if c == "/")


def _size(value: Any, path: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_FILE_BYTES:
        raise NonsenseError(f"the size of {quoted(path)} is {_shown(value)}")
    return value


def _digest(value: Any, pattern: re.Pattern[str], path: str) -> str:
    return _text(value, pattern.fullmatch, f"the checksum of {quoted(path)}")


def _text(value: Any, is_good: Callable[[str], object] | None, what: str) -> str:
    if not isinstance(value, str) or (is_good is not None and not is_good(value)):
        raise NonsenseError(f"{what} is {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """A value of any kind, in a few words."""
    if isinstance(value, str):
        return quoted(value)
    if value is None:
        return "missing"
    if isinstance(value, int | float):
        return _SHORT.repr(value)
    return "a list" if isinstance(value, list) else "an object"
