"""The keys that requests must have, compared in a time that says nothing of them."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping

from localkv.errors import UsageError, printable
from localkv.system.files import read_input

MOST_FILE = 1 << 20
"""Bytes of a file of keys."""


class ApiKeys:
    """Keys that a request may have. Only their digests are kept.

    Args:
        keys: what they are; none lets everybody in.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in sorted(keys)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def number(self, given: str) -> int | None:
        """Which key it is, from 1; None for none. It takes as long whichever it is."""
        digest, found = _digest(given), None
        for number, known in enumerate(self._digests, 1):
            if hmac.compare_digest(digest, known):
                found = number
        return found


def given_key(headers: Mapping[str, str]) -> str:
    """The key of a request: `Authorization: Bearer KEY`, or `x-api-key` as Anthropic's clients
    have it; empty if there is none."""
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip()


def read_keys(listed: str | None, path: str | os.PathLike[str] | None) -> frozenset[str]:
    """Read keys from a list with commas between them, and from a file with one a line.

    Raises:
        UsageError: the file can't be read, or where keys were to be there are none.
    """
    keys = set[str]()
    if listed is not None:
        keys |= _named(listed.split(","), "--api-key")
    if path is not None:
        name = f"--api-key-file {printable(path)}"
        try:
            text = read_input(path, MOST_FILE, name).decode()
        except OSError as error:
            raise UsageError(f"{name}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{name}: not UTF-8") from error
        keys |= _named(text.splitlines(), name)
    return frozenset(keys)


def _named(parts: Iterable[str], source: str) -> set[str]:
    keys = {key for part in parts if (key := part.strip())}
    if not keys:
        raise UsageError(f"{source} has no key", hint="leave it out to let everybody in")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
