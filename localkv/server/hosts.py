"""By which names a server is called, and from which pages: the checks that browsers need.

A page of a stranger can let its own name point at this machine (DNS rebinding), and then its
scripts read what the server answers. They can't change the header `Host`, which has that name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from localkv.errors import UsageError

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
