"""By which names a server is called, and from which pages: the checks that browsers need.

A page of a stranger can let its own name point at this machine (DNS rebinding), and then its
scripts read what the server answers. They can't change the header `Host`, which has that name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit


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


def _host(authority: str) -> str:
    """Without a port, and brackets of an address."""
    try:
        host = urlsplit(f"//{authority}").hostname
    except ValueError:
        return authority.lower()
    return (host or "").lower().rstrip(".")
