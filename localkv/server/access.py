"""Who may call a server: the keys that requests must have, and the hosts and origins that it knows.

Keys are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Collection, Iterable, Mapping
from urllib.parse import urlsplit

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
        """The number of a key, from 1; None for none. It takes as long for each."""
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


ANY, LOCAL, OPAQUE = "*", "localhost", "null"
"""Words for all origins, for origins of this machine, and for pages that have none."""
LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?"
"""Regular expression of an origin of this machine, at any port."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([^\s/?#@:\[\]]+|\[[0-9a-f:.]+\])(:[0-9]+)?")


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def known_hosts(hosts: Collection[str], others: Collection[str]) -> frozenset[str]:
    """Names that a server goes by.

    Args:
        hosts: where it was told to listen.
        others: further ones.
    """
    names = {"localhost", *hosts, socket.gethostname(), *others}
    return frozenset(name.strip().lower().rstrip(".") for name in names if name.strip())


def is_known(authority: str, names: Collection[str]) -> bool:
    """Whether a `Host` is one of them, or an address, which nobody can rebind."""
    host = _host(authority)
    if host in names or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_same(origin: str, authority: str) -> bool:
    """Whether an `Origin` is this server itself; a proxy may have another scheme."""
    try:
        return urlsplit(origin).netloc.lower() == authority.lower() != ""
    except ValueError:
        return False


def checked_origins(origins: Collection[str]) -> tuple[str, ...]:
    """Origins as browsers write them.

    Raises:
        UsageError: one is none.
    """
    found = tuple(origin.lower() for origin in origins)
    for origin in found:
        if origin not in (ANY, LOCAL, OPAQUE) and not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"{origin!r:.100} is no origin",
                hint="one is such as https://chat.example or http://10.0.0.5:3000; localhost "
                "stands for all of this machine, * for all there are",
            )
    return found


def may_call(origin: str, allowed: Collection[str]) -> bool:
    """Whether pages of an `Origin` may call a server that allows some."""
    is_local = LOCAL in allowed and re.fullmatch(LOCAL_ORIGIN, origin) is not None
    return is_local or ANY in allowed or origin in allowed


def _host(authority: str) -> str:
    """Without a port, and brackets of an address."""
    try:
        host = urlsplit(f"//{authority}").hostname
    except ValueError:
        return authority.lower()
    return (host or "").lower().rstrip(".")
